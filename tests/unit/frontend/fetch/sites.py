"""Web servers for tests: each on an address of its own, each as bad as it is told to be."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

PUBLIC = "127.0.1.1"
OTHER_PUBLIC = "127.0.1.2"
PRIVATE = "127.0.0.1"
"""Of these loopback addresses the tests' policy takes 127.0.1.* for public."""


@dataclass(frozen=True)
class Request:
    """What a server received."""

    path: str
    headers: Mapping[str, str]


Handler: TypeAlias = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Site:
    """A server, what it answers, and what it has seen."""

    host: str
    port: int = 0
    routes: dict[str, Handler] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    def url(self, path: str = "/x.png", *, host: str | None = None, scheme: str = "http") -> str:
        return f"{scheme}://{host or self.host}:{self.port}{path}"

    async def closed(self) -> None:
        """Wait until every connection is closed."""
        async with asyncio.timeout(60):
            await self._idle.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self._idle.clear()
        self._writers.add(writer)
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
                first, *lines = head.split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines if line)
                request = Request(first.split(" ")[1], headers)
                self.requests.append(request)
                path = request.path.partition("?")[0]
                answer = asyncio.ensure_future(self.routes[path](request, writer))
                while not answer.done() and not (reader.at_eof() or reader.exception()):
                    await asyncio.wait([answer], timeout=0.01)
                if not answer.done():
                    answer.cancel()
                    await asyncio.wait([answer])
                    break
                answer.result()
                if writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            self._writers.discard(writer)
            if not self.open:
                self._idle.set()
            writer.close()


@asynccontextmanager
async def serving(
    site: Site, tls: ssl.SSLContext | None = None, sock: socket.socket | None = None
) -> AsyncIterator[Site]:
    """Run a site, on a listening socket if one is given."""
    if sock is None:
        server = await asyncio.start_server(site._serve, site.host, site.port, ssl=tls)
    else:
        server = await asyncio.start_server(site._serve, sock=sock, ssl=tls)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()
        for writer in site._writers:
            writer.transport.abort()
        await site.closed()
        await server.wait_closed()


def answer(
    body: bytes = b"", status: int = 200, *, length: int | None = None, **headers: str
) -> Handler:
    """A whole answer. Underscores in names of headers are hyphens."""

    async def handle(_: Request, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} Whatever"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if status != 304:
            lines.append(f"Content-Length: {len(body) if length is None else length}")
        writer.write("\r\n".join(lines).encode("latin-1", "surrogateescape") + b"\r\n\r\n" + body)
        await writer.drain()
        if length is not None:
            writer.close()

    return handle


def redirect(to: str, status: int = 302) -> Handler:
    """A redirect."""
    return answer(status=status, Location=to)


def revalidated(body: bytes, etag: str) -> Handler:
    """An answer that need not be sent again to who has it."""

    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        known = request.headers.get("If-None-Match") == etag
        await (answer(status=304) if known else answer(body, ETag=etag))(request, writer)

    return handle


def drip(pieces: bytes, every_s: float, *, head: bytes | None = None) -> Handler:
    """One byte now and then."""

    async def handle(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" if head is None else head)
        for byte in pieces:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(every_s)

    return handle


async def silence(_: Request, writer: asyncio.StreamWriter) -> None:
    """No answer at all."""
    await asyncio.Event().wait()


async def hang_up(_: Request, writer: asyncio.StreamWriter) -> None:
    """A closed connection for an answer."""
    writer.close()


def endless(chunk: bytes) -> Handler:
    """Chunks, as fast as they go."""

    async def handle(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()

    return handle


def in_turn(*handlers: Handler) -> Handler:
    """Each handler once; the last one from then on."""
    left = list(handlers)

    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(request, writer)

    return handle


def gated(gate: asyncio.Event, handler: Handler) -> Handler:
    """An answer once a gate is open."""

    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await handler(request, writer)

    return handle
