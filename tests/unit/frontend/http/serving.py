"""A real HTTP server as the frontend's, with an app of a test's, and raw connections to it."""

import argparse
import asyncio
import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from frontend.args import parse
from frontend.asgi import App
from frontend.door import make_door
from frontend.http.server.readiness_gate import ReadinessGate
from frontend.http.server.uvicorn_server import Server
from frontend.http.server.vllm_server import uvicorn_config
from frontend.http.settings import HttpSettings
from tests.waiting import until


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


class Client:
    """One connection, of which a test decides every byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
        await self.writer.drain()

    async def reply(self) -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        body = await self.reader.readexactly(int(headers["content-length"]))
        return Reply(int(first.split()[1]), headers, body)

    async def until_closed(self) -> bytes:
        """What else comes before the server closes; a reset is as good. Closes as well: for a
        client that does not the server lingers."""
        rest = b""
        try:
            while piece := await self.reader.read(1 << 16):
                rest += piece
        except ConnectionResetError:
            pass
        await self.close()
        return rest

    async def close(self) -> None:
        self.writer.transport.abort()


class Serving:
    """A server that runs."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.state = server.server_state
        self.port: int = server.servers[0].sockets[0].getsockname()[1]
        self._clients: list[Client] = []

    async def connect(self, **options: Any) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, **options))
        self._clients.append(client)
        return client

    async def ask(self, *pieces: bytes) -> Reply:
        client = await self.connect()
        await client.send(*pieces)
        reply = await client.reply()
        await client.close()
        return reply

    async def until_nothing_is_left(self) -> None:
        await until(lambda: not self.state.connections and not self.state.tasks)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.until_nothing_is_left()


@functools.cache
def _serve_args(*flags: str) -> argparse.Namespace:
    """Making vLLM's parser takes a second."""
    return parse(["--port=0", *flags]).serve


def behind_door(app: App, *flags: str, settings: HttpSettings | None = None) -> App:
    """Return an app behind all that requests to a frontend's pass.

    Args:
        settings: instead of those that the flags make.
    """
    gate = ReadinessGate(lambda: None)
    gate.let_in(app)
    args = parse([*flags])
    return make_door(args if settings is None else replace(args, http=settings), gate)


@asynccontextmanager
async def serving(app: App, settings: HttpSettings, *flags: str) -> AsyncIterator[Serving]:
    """Serve an app as the frontend would, until the end of the context. A test that hangs ends
    in a minute."""
    async with asyncio.timeout(60):
        server = Server(uvicorn_config(app, _serve_args(*flags), settings))
        running = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        served = Serving(server)
        try:
            yield served
        finally:
            await served.close()
            server.should_exit = True
            await running


def post(*headers: str, path: str = "/work", method: str = "POST") -> bytes:
    """The head of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()


def with_body(body: bytes, *headers: str, path: str = "/work") -> bytes:
    """A whole request."""
    return post(f"Content-Length: {len(body)}", *headers, path=path) + body
