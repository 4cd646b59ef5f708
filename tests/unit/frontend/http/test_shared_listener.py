"""Two servers that accept from one socket, as two processes of a frontend do."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from socket import SHUT_RDWR, socket

import pytest

from frontend.args import parse
from frontend.asgi import App, Receive, Scope, Send
from frontend.http.server.uvicorn_server import Server, SharedListener
from frontend.http.server.vllm_server import uvicorn_config
from frontend.http.settings import HttpSettings
from frontend.processes.listeners import ConnectionCounts, listen
from tests.certificates import Authority
from tests.unit.frontend.http.serving import Client, post
from tests.waiting import until


class Sibling:
    """One of two processes, as its server sees it."""

    def __init__(self, name: int, listener: socket, counts: ConnectionCounts, alone: bool) -> None:
        self.name = name
        self.listeners = [listener.dup()]
        self.alone = alone
        self._counts = counts

    def has(self, connections: int | None) -> None:
        if connections is None:
            self._counts.not_accepting(self.name)
        else:
            self._counts.set(self.name, connections)

    def another_has_fewer(self) -> bool:
        return self._counts.another_has_fewer(self.name)


class Two:
    def __init__(self, servers: list[Server], port: int) -> None:
        self.servers = servers
        self.port = port
        self.clients: list[Client] = []

    async def connect(self, **options: object) -> Client:
        opened = await asyncio.open_connection("127.0.0.1", self.port, **options)  # type: ignore[arg-type]
        self.clients.append(Client(*opened))
        return self.clients[-1]

    def shares(self) -> list[int]:
        return [len(server.server_state.connections) for server in self.servers]


def says(name: int) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": str(name).encode()})

    return app


Started = Callable[[], None]


@asynccontextmanager
async def two(*flags: str, alone: bool = True) -> AsyncIterator[Two]:
    async with asyncio.timeout(60):
        (listener,) = listen("127.0.0.1", 0, None)
        port = listener.getsockname()[1]
        counts = ConnectionCounts(ConnectionCounts.make(2), 2)
        serve = parse([*flags]).serve
        servers = [
            Server(
                uvicorn_config(says(name), serve, HttpSettings()),
                Sibling(name, listener, counts, alone),  # type: ignore[arg-type]
            )
            for name in range(2)
        ]
        listener.close()
        running = [asyncio.create_task(server.serve()) for server in servers]
        await until(lambda: all(server.started for server in servers))
        made = Two(servers, port)
        try:
            yield made
        finally:
            for client in made.clients:
                await client.close()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*running)


async def test_connections_that_are_kept_are_shared_out() -> None:
    async with two() as made:
        for _ in range(12):
            client = await made.connect()
            await client.send(post(method="GET"))
            assert (await client.reply()).status == 200
        assert max(made.shares()) <= 7, made.shares()


async def test_a_server_takes_none_before_it_is_told_to() -> None:
    async with two(alone=False) as made:
        clients = [await made.connect() for _ in range(4)]
        for client in clients:
            await client.send(post(method="GET"))
        assert made.shares() == [0, 0]
        made.servers[1].accept()
        for client in clients:
            assert (await client.reply()).body == b"1"
        assert made.shares() == [0, 4]


async def test_one_that_ends_leaves_connections_to_the_other() -> None:
    async with two() as made:
        made.servers[0].should_exit = True
        await until(lambda: not made.servers[0].servers[0].is_serving())
        for _ in range(3):
            client = await made.connect()
            await client.send(post(method="GET"))
            assert (await client.reply()).body == b"1"


@pytest.fixture
def certified(tmp_path: Path) -> tuple[list[str], ssl.SSLContext]:
    authority = Authority(tmp_path / "ca")
    pem = authority.certify("127.0.0.1")
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    return [f"--ssl-certfile={pem.certificate}", f"--ssl-keyfile={pem.key}"], trust


async def test_tls_and_handshakes_that_come_to_nothing(
    certified: tuple[list[str], ssl.SSLContext],
) -> None:
    flags, trust = certified
    async with two(*flags) as made:
        plain = await made.connect()
        await plain.send(post(method="GET"))
        await plain.until_closed()
        hung = await made.connect()  # says nothing; keeps nobody from ending
        assert not hung.reader.at_eof()
        client = await made.connect(ssl=trust)
        await client.send(post(method="GET"))
        assert (await client.reply()).status == 200


async def test_one_that_was_shut_down_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its parent shuts it down in all processes, before it tells each of them to end."""
    (listener,) = listen("127.0.0.1", 0, None)
    shared = SharedListener(
        listener, asyncio.Protocol, lambda: None, 1.0, lambda: False, lambda: None
    )
    shared.start()
    listener.shutdown(SHUT_RDWR)
    shared._take()
    assert not asyncio.get_running_loop().remove_reader(listener.fileno())
    shared.close()
    assert not caplog.records


async def test_connections_that_come_together_are_accepted_together() -> None:
    """One a turn of the event loop made a GET wait behind 200 new chats."""
    (listener,) = listen("127.0.0.1", 0, None)
    listener.setblocking(False)
    opened: list[int] = []
    shared = SharedListener(
        listener,
        asyncio.Protocol,
        lambda: None,
        1.0,
        lambda: False,
        lambda: opened.append(shared.opening),
    )
    clients = [await asyncio.open_connection(*listener.getsockname()[:2]) for _ in range(20)]
    shared._accept()
    assert opened == [*range(1, 21)]
    await shared.wait_closed()
    shared.close()
    for _, writer in clients:
        writer.close()
