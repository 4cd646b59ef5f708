"""Clients that send or read too slowly, too much or nonsense, at a real server."""

import asyncio
import contextlib
import datetime
import gc
import io
import itertools
import json
import shutil
import socket
import ssl
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.responses import JSONResponse

from common.errors import ConfigurationError
from frontend.asgi import App, Arrival, Door, Message, Receive, Scope, Send, unanswered
from frontend.http.error_shapes import say_when_to_retry
from frontend.http.limits import connection
from frontend.http.limits.admission import Admission
from frontend.http.server import uvicorn_server
from frontend.http.server.uvicorn_server import TlsRefresh
from frontend.http.settings import HttpSettings
from frontend.request_context import current_context
from tests.certificates import Authority
from tests.unit.frontend.http.serving import post, serving, with_body
from tests.waiting import until

MB = 1 << 20
CHUNKED = "Transfer-Encoding: chunked"


class Workshop:
    """An app that tells what it got. Paths: ``/work`` says the size of the body, ``/wait`` does so
    when told to, ``/stream`` never ends, ``/large`` answers 32 MiB."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.admission = Admission(settings)
        self.app = Door(self._serve, [say_when_to_retry, self.admission])
        self.got: list[Message] = []
        self.headers: set[bytes] = set()
        self.go_on = asyncio.Event()
        self.waiting = 0
        self.left = 0

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        self.headers.update(name for name, _ in scope["headers"])
        more = scope["method"] != "GET"
        while more:
            message = await receive()
            self.got.append(message)
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        if scope["path"] == "/wait":
            self.waiting += 1
            await self._wait(receive)
        if scope["path"] == "/stream":
            await self._stream(receive, send)
            return
        body = bytes(32 * MB) if scope["path"] == "/large" else b"%d" % size
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _wait(self, receive: Receive) -> None:
        left = asyncio.create_task(self._until_left(receive))
        told = asyncio.create_task(self.go_on.wait())
        await asyncio.wait((left, told), return_when=asyncio.FIRST_COMPLETED)
        for task in (left, told):
            task.cancel()
        await asyncio.gather(left, told, return_exceptions=True)

    async def _stream(self, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(self._until_left(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not left.done():
            await send({"type": "http.response.body", "body": bytes(1000), "more_body": True})
            await asyncio.sleep(0)

    async def _until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left += 1

    @property
    def places(self) -> int:
        return self.admission._places.taken

    @property
    def memory(self) -> int:
        return self.admission._bodies.budget.taken

    def serving(self) -> Any:
        return serving(self.app, self.settings)


@pytest.mark.parametrize("sent", [b"", b"POST /work HT", post("X-Slow: 1")[:-2], b"\r\n"])
async def test_a_head_that_does_not_end_is_given_up(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    async with Workshop(HttpSettings()).serving() as server:
        client = await server.connect()
        await client.send(sent)
        answer = await client.until_closed()
        await server.until_nothing_is_left()
    if len(sent) > 2:
        assert answer.startswith(b"HTTP/1.1 408 ") and b"the head did not arrive" in answer
    else:
        assert answer == b""


@pytest.mark.parametrize("together", [True, False])
async def test_a_request_sent_ahead_has_no_salt_of_the_one_before_it(together: bool) -> None:
    """Not all bodies are JSON, which would set it anew: an upload for /v1/audio is not."""
    salts: dict[str, str | None] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        salts[scope["path"]] = current_context().salt
        current_context().note_salt({"cache_salt": "mine"})
        if scope["path"] == "/first":
            await sent.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent = asyncio.Event()
    async with serving(app, HttpSettings()) as server:
        client = await server.connect()
        first, second = with_body(b"1", path="/first"), with_body(b"2", path="/second")
        if together:
            await client.send(first + second)
        else:
            await client.send(first)
            await until(lambda: salts)
            (protocol,) = server.state.connections
            await client.send(second)
            await until(lambda: protocol._ahead)  # type: ignore[union-attr]
        sent.set()
        await until(lambda: len(salts) == 2)
    assert salts == {"/first": None, "/second": None}


@pytest.mark.parametrize("then", [b"\r\n", b"POST"])
async def test_so_is_the_head_of_a_second_request(
    then: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    async with Workshop(HttpSettings()).serving() as server:
        client = await server.connect()
        await client.send(with_body(b"one"))
        assert (await client.reply()).body == b"3"
        await client.send(then)
        await client.until_closed()
        await server.until_nothing_is_left()


async def test_the_head_of_the_next_request_may_take_as_long_as_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.05)
    shop = Workshop(HttpSettings())
    async with shop.serving() as server:
        client = await server.connect()
        await client.send(with_body(b"one", path="/wait"), b"GET /")
        await until(lambda: shop.waiting)
        (protocol,) = server.state.connections
        assert isinstance(protocol, connection.Connection)
        await until(lambda: protocol._head_timer is None)  # it was late
        shop.go_on.set()
        assert (await client.reply()).body == b"3"
        assert (await client.reply()).status == 408


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 70_000,
        b"GET / HTTP/1.1\r\nX: " + b"x" * 400_000,
        b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 300,
        post(f"X: {'x' * 66_000}"),
    ],
    ids=["url", "header", "headers", "whole"],
)
async def test_a_head_that_is_too_large_is_refused(head: bytes) -> None:
    async with Workshop(HttpSettings()).serving() as server:
        reply = await server.ask(head)
        assert reply.status == 431
        assert "64 KiB" in reply.error()
        await server.until_nothing_is_left()


@pytest.mark.parametrize("trailer", [b"X: 1\r\n", b"x"])
async def test_trailers_without_end_are_cut_off(trailer: bytes) -> None:
    shop = Workshop(HttpSettings())
    async with shop.serving() as server:
        client = await server.connect()
        await client.send(post(CHUNKED), b"1\r\nx\r\n0\r\n", trailer * 500_000)
        await client.until_closed()
        await server.until_nothing_is_left()
        assert (shop.got, shop.memory) == ([], 0)


async def test_trailers_are_no_headers() -> None:
    """A trailer that a proxy passes on, `X-Forwarded-For`, gave each request another client."""
    shop = Workshop(HttpSettings())
    async with shop.serving() as server:
        trailers = b"X-Forwarded-For: 192.0.2.1\r\nAuthorization: Bearer a\r\n\r\n"
        reply = await server.ask(post(CHUNKED, "X-A: b") + b"1\r\nx\r\n0\r\n" + trailers)
        assert (reply.status, reply.body) == (200, b"1")
    assert b"x-a" in shop.headers
    assert shop.headers.isdisjoint({b"x-forwarded-for", b"authorization"})


async def test_bodies_that_do_not_end_take_no_place_and_are_given_up() -> None:
    """Eight of them once filled eight places for ever."""
    shop = Workshop(HttpSettings(max_inflight=8, body_timeout_s=2))
    async with shop.serving() as server:
        clients = [await server.connect() for _ in range(8)]
        for client in clients:
            await client.send(post("Content-Length: 100"), b"some")
        await until(lambda: shop.memory == 8 * 4)
        assert (await server.ask(with_body(b"whole"))).body == b"5"
        for client in clients:
            reply = await client.reply()
            assert reply.status == 408
            assert "within 2 s" in reply.error()
            await client.until_closed()
        await server.until_nothing_is_left()
    assert (shop.memory, shop.places) == (0, 0)


@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)])
@pytest.mark.parametrize("path", ["/work", "/nowhere"])
@pytest.mark.parametrize("method", ["POST", "PUT", "GET", "OPTIONS", "BREW"])
async def test_a_body_that_says_it_is_too_large_is_not_read(
    expect: tuple[str, ...], path: str, method: str
) -> None:
    shop = Workshop(HttpSettings(max_body_mb=1))
    async with shop.serving() as server:
        client = await server.connect()
        head = post(f"Content-Length: {MB + 1}", *expect, path=path, method=method)
        if method == "BREW":
            await client.send(head)
            assert (await client.reply()).status == 400
        else:
            await client.send(head)
            reply = await client.reply()
            assert (reply.status, reply.headers["connection"]) == (413, "close")
            assert "1 MiB of --max-body-mb" in reply.error()
        assert await client.until_closed() == b""
        await server.until_nothing_is_left()
    assert shop.got == []


async def test_a_body_that_becomes_too_large_is_cut_off() -> None:
    shop = Workshop(HttpSettings(max_body_mb=1))
    async with shop.serving() as server:
        client = await server.connect()
        await client.send(post(CHUNKED))
        chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        await client.send(*[chunk] * 16)
        await until(lambda: shop.memory == MB)
        await client.send(b"1\r\nx\r\n")
        assert (await client.reply()).status == 413
        await client.until_closed()
        await server.until_nothing_is_left()
    assert (shop.got, shop.memory) == ([], 0)


async def by_aiohttp(url: str, bodies: list[bytes]) -> list[int]:
    async with aiohttp.ClientSession() as session:
        return [await _asked(session.post(url, data=io.BytesIO(body))) for body in bodies]


async def _asked(request: Any) -> int:
    async with request as reply:
        await reply.read()
        return int(reply.status)


async def by_httpx(url: str, bodies: list[bytes]) -> list[int]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return [(await client.post(url, content=body)).status_code for body in bodies]


async def by_requests(url: str, bodies: list[bytes]) -> list[int]:
    def ask() -> list[int]:
        with requests.Session() as session:
            session.trust_env = False
            return [session.post(url, data=body).status_code for body in bodies]

    return await asyncio.to_thread(ask)


async def by_node(url: str, bodies: list[bytes]) -> list[int]:
    """``fetch`` of Node.js, and so undici, which browsers' pages and most of JavaScript's SDKs are
    tested with."""
    if (node := shutil.which("node")) is None:
        pytest.skip("needs node")
    script = (
        "const [url, ...sizes] = process.argv.slice(1);"
        "for (const size of sizes) {"
        "  const reply = await fetch(url, {method: 'POST', body: new Uint8Array(Number(size))});"
        "  await reply.text(); console.log(reply.status) }"
    )
    command = [node, "--input-type=module", "--eval", script, url, *(str(len(b)) for b in bodies)]
    running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await running.communicate()
    assert running.returncode == 0
    return [int(line) for line in told.split()]


@pytest.mark.parametrize("ask", [by_aiohttp, by_httpx, by_requests, by_node])
async def test_clients_that_keep_connections_go_on_after_a_refusal(
    ask: Callable[[str, list[bytes]], Awaitable[list[int]]],
) -> None:
    """The body of a refused request is not read: what of it is still on its way is no request."""
    shop = Workshop(HttpSettings(max_inflight=1))
    async with shop.serving() as server:
        client = await server.connect()
        await client.send(with_body(b"1", path="/wait"))
        await until(lambda: shop.waiting)
        url = f"http://127.0.0.1:{server.port}"
        large = bytes(4 * MB)
        refused = await ask(f"{url}/work", [b"1", large, b"1", large, large])
        assert refused == [429] * 5
        shop.go_on.set()
        assert (await client.reply()).status == 200
        assert await ask(f"{url}/work", [b"1", large, b"1"]) == [200] * 3
    assert (shop.places, shop.memory) == (0, 0)


async def test_who_sends_more_than_is_read_still_gets_the_answer() -> None:
    """A connection that is closed under him would be reset, and the answer lost."""
    async with Workshop(HttpSettings(max_body_mb=1)).serving() as server:
        client = await server.connect()
        reading = asyncio.create_task(client.reply())
        with contextlib.suppress(ConnectionError):  # it may be cut off later
            await client.send(post(f"Content-Length: {64 * MB}"), *[bytes(MB)] * 64)
        assert (await reading).status == 413
        await server.until_nothing_is_left()


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: -1",),
        ("Content-Length: 1000000000000000000000000000000",),
        ("Content-Length: 1", "Content-Length: 2"),
        ("Content-Length: 1", CHUNKED),
        ("Content-Length: 0x10",),
        ("Transfer-Encoding: gzip",),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: gzip", CHUNKED),
        ("Transfer-Encoding: identity, chunked",),
        (CHUNKED, CHUNKED),
        (CHUNKED, "Content-Length: 1"),
        ("Host: a", "Host: a"),
        ("Host: a", "Host: b"),
        ("X: a\r\n b",),
        ("X: a\rY: b",),
        ("X: a\nY: b",),
        ("Content-Length : 1",),
        ("Bad Header: 1",),
    ],
)
async def test_nonsense_is_answered_400_and_leaves_nothing(headers: tuple[str, ...]) -> None:
    shop = Workshop(HttpSettings())
    async with shop.serving() as server:
        client = await server.connect()
        await client.send(post(*headers), b"x")
        reply = await client.reply()
        assert reply.status == 400 and reply.error()
        await client.until_closed()
        await server.until_nothing_is_left()
    assert shop.got == []


@pytest.mark.parametrize(
    ("version", "status"), [("1.0", 400), ("1.1", 200), ("1.2", 400), ("2.0", 400)]
)
async def test_chunks_are_read_in_http_1_1_alone(version: str, status: int) -> None:
    async with Workshop(HttpSettings()).serving() as server:
        client = await server.connect()
        head = post(CHUNKED).replace(b"HTTP/1.1", f"HTTP/{version}".encode())
        await client.send(head + b"1\r\nx\r\n0\r\n\r\n")
        assert (await client.reply()).status == status


@pytest.mark.parametrize(("version", "status"), [("1.0", 200), ("1.1", 400)])
async def test_a_host_is_named_since_http_1_1(version: str, status: int) -> None:
    async with Workshop(HttpSettings()).serving() as server:
        client = await server.connect()
        await client.send(f"POST /work HTTP/{version}\r\nContent-Length: 0\r\n\r\n".encode())
        reply = await client.reply()
        assert reply.status == status
        assert status == 200 or "one Host" in reply.error()


async def test_a_client_of_a_proxy_of_this_host_has_its_own_address() -> None:
    async def peer(arrival: Arrival) -> App:
        return JSONResponse(arrival.context.peer)

    async with serving(Door(unanswered, [peer]), HttpSettings()) as server:
        reply = await server.ask(post("X-Forwarded-For: 192.0.2.7", "Content-Length: 0"))
    assert json.loads(reply.body) == "192.0.2.7"


async def test_a_compressed_body_is_refused() -> None:
    async with Workshop(HttpSettings()).serving() as server:
        reply = await server.ask(with_body(b"x", "Content-Encoding: gzip"))
        assert reply.status == 415
        assert "Content-Encoding" in reply.error()
        assert (await server.ask(with_body(b"x", "Content-Encoding: identity"))).body == b"1"


async def test_chunks_of_a_byte_are_refused_beyond_some() -> None:
    """The parser calls for each, and those of a quarter of a megabyte came in one turn."""
    few = connection.SMALL_CHUNKS
    shop = Workshop(HttpSettings())
    async with shop.serving() as server:
        client = await server.connect()
        await client.send(post(CHUNKED), b"1\r\nx\r\n" * few, b"0\r\n\r\n")
        assert (await client.reply()).body == b"%d" % few
        await client.send(post(CHUNKED), b"10\r\n" + bytes(16) + b"\r\n", b"1\r\nx\r\n" * few)
        reply = await client.reply()
        assert (reply.status, "chunks of less than" in reply.error()) == (400, True)
        await client.until_closed()
        larger = b"%x\r\n" % connection.MIN_CHUNK + bytes(connection.MIN_CHUNK) + b"\r\n"
        sent = await server.ask(post(CHUNKED) + larger * 2 * few + b"0\r\n\r\n")
        assert sent.body == b"%d" % (connection.MIN_CHUNK * 2 * few)
        await server.until_nothing_is_left()
    assert shop.memory == 0


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_reaches_the_app_as_one_message(chunked: bool) -> None:
    body = bytes(range(256)) * (5 * MB // 256)
    request = with_body(body)
    if chunked:
        size = 77_777
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        request = post(CHUNKED) + chunks + b"0\r\n\r\n"
    shop = Workshop(HttpSettings())
    async with shop.serving() as server:
        assert (await server.ask(request)).body == b"%d" % len(body)
        await server.until_nothing_is_left()
    assert shop.got == [{"type": "http.request", "body": body, "more_body": False}]


async def test_who_waits_for_leave_to_send_gets_it() -> None:
    async with Workshop(HttpSettings()).serving() as server:
        client = await server.connect()
        await client.send(post("Content-Length: 3", "Expect: 100-continue"))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"one")
        assert (await client.reply()).body == b"3"


@pytest.mark.parametrize("half_closed", [False, True])
@pytest.mark.parametrize(
    "sent",
    [b"POST /work", post("Content-Length: 9"), post("Content-Length: 9") + b"some"],
    ids=["head", "no body", "body"],
)
async def test_who_leaves_in_the_middle_leaves_nothing(sent: bytes, half_closed: bool) -> None:
    shop = Workshop(HttpSettings())
    async with shop.serving() as server:
        client = await server.connect()
        await client.send(sent)
        await until(lambda: server.state.tasks or not sent.startswith(b"POST /work H"))
        if half_closed:
            client.writer.write_eof()
            await client.until_closed()
        else:
            await client.close()
        await server.until_nothing_is_left()
    assert (shop.memory, shop.places, shop.got) == (0, 0, [])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("half_closed", [False, True])
async def test_a_request_behind_which_another_waits_hears_that_its_client_left(
    half_closed: bool, at_once: bool
) -> None:
    shop = Workshop(HttpSettings())
    async with shop.serving() as server:
        client = await server.connect()
        await client.send(with_body(b"one", path="/wait"), with_body(b"two") if at_once else b"")
        await until(lambda: shop.waiting)
        await client.send(with_body(b"two"))
        (protocol,) = server.state.connections
        assert isinstance(protocol, connection.Connection)
        await until(lambda: protocol._ahead)
        if half_closed:
            client.writer.write_eof()
        else:
            await client.close()
        await server.until_nothing_is_left()
    assert (shop.left, shop.places) == (1, 0)


@pytest.mark.parametrize("apart", [1, 50, 100_000])
async def test_requests_sent_ahead_are_answered_in_turn(apart: int) -> None:
    sizes = [0, 1, 2, 3, 400_000, 5, 6, 70_000, 8]
    ahead = b"".join(with_body(b"x" * size) for size in sizes)
    async with Workshop(HttpSettings()).serving() as server:
        client = await server.connect()
        cuts = [*range(0, 500, apart), *range(500, len(ahead) + 100_000, 100_000)]
        pieces = [ahead[at:to] for at, to in itertools.pairwise(cuts)]

        async def send() -> None:
            for piece in pieces:
                await client.send(piece)
                await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        assert [(await client.reply()).body for _ in sizes] == [b"%d" % size for size in sizes]
        await sending


async def test_too_many_requests_sent_ahead_end_the_connection() -> None:
    shop = Workshop(HttpSettings())
    async with shop.serving() as server:
        client = await server.connect()
        await client.send(with_body(b"", path="/wait"), post(method="GET") * 1000)
        await client.until_closed()
        await server.until_nothing_is_left()
    assert shop.places == 0


@pytest.mark.parametrize("path", ["/stream", "/large"])
async def test_who_does_not_read_his_answer_is_disconnected(path: str) -> None:
    shop = Workshop(HttpSettings(send_timeout_s=0.2))
    async with shop.serving() as server:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(("127.0.0.1", server.port))
        with narrow:
            narrow.sendall(with_body(b"one", path=path))
            await until(lambda: shop.got)
            await server.until_nothing_is_left()
    assert (shop.places, shop.memory) == (0, 0)
    assert shop.left == (path == "/stream")


async def test_who_keeps_a_refused_connection_open_loses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    async with Workshop(HttpSettings(max_body_mb=1)).serving() as server:
        client = await server.connect()
        await client.send(post(f"Content-Length: {MB + 1}"))
        assert (await client.reply()).status == 413
        await server.until_nothing_is_left()


class Buffer:
    """A transport's, as far as the watch over a reader looks at it."""

    size = 0
    aborted = False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(
    ("taken", "again", "kept"),
    [(connection.LEAST_TAKEN, False, True), (connection.LEAST_TAKEN - 1, False, False),
     (1000, True, False), (connection.LEAST_TAKEN, True, True)],
)  # fmt: skip
async def test_who_reads_slowly_but_enough_is_served(taken: int, again: bool, kept: bool) -> None:
    """``again``: what was taken was all that there was, and then there was more."""
    shop = Workshop(HttpSettings(send_timeout_s=1000))
    async with shop.serving() as server:
        await server.connect()
        await until(lambda: server.state.connections)
        (protocol,) = server.state.connections
        assert isinstance(protocol, connection.Connection)
        transport, buffer = protocol.transport, Buffer()
        protocol.transport = buffer  # type: ignore[assignment]
        buffer.size = taken if again else 10 * MB
        protocol.pause_writing()
        first = protocol._send_timer
        if again:
            protocol.resume_writing()
            buffer.size = 10 * MB
            protocol.pause_writing()
            assert protocol._send_timer is first
        else:
            buffer.size -= taken
        assert first is not None
        first.cancel()
        protocol._check_reader()
        protocol.transport = transport
        assert (buffer.aborted, protocol._send_timer is None) == (not kept, not kept)


async def test_who_has_caught_up_is_not_watched_any_more() -> None:
    shop = Workshop(HttpSettings(send_timeout_s=1000))
    async with shop.serving() as server:
        client = await server.connect()
        await client.send(with_body(b"", path="/large"))
        await client.reply()
        (protocol,) = server.state.connections
        assert isinstance(protocol, connection.Connection)
        await until(lambda: not protocol.flow.write_paused)
        assert protocol._send_timer is not None
        protocol._send_timer.cancel()
        protocol._check_reader()
        assert protocol._send_timer is None
        await client.send(with_body(b"one"))
        assert (await client.reply()).body == b"3"


async def test_one_connection_too_many_is_told_so() -> None:
    shop = Workshop(HttpSettings(max_connections=2))
    async with shop.serving() as server:
        busy = [await server.connect() for _ in range(2)]
        for client in busy:
            await client.send(with_body(b"one", path="/wait"))
        await until(lambda: shop.waiting == 2)
        third = await server.connect()
        reply = await third.reply()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert "too many connections" in reply.error()
        assert await third.until_closed() == b""
        shop.go_on.set()
        for client in busy:
            assert (await client.reply()).body == b"3"
        assert (await server.ask(with_body(b"one"))).body == b"3"


async def test_strangers_who_send_nothing_lock_nobody_out() -> None:
    async with Workshop(HttpSettings(max_connections=2)).serving() as server:
        begun = await server.connect()
        await begun.send(b"POST /work HT")
        await until(lambda: any(each._in_head for each in server.state.connections))
        silent = [await server.connect() for _ in range(5)]
        assert (await server.ask(with_body(b"one"))).body == b"3"
        assert await begun.until_closed() == b"", "it has waited for longest"
        assert await silent[0].until_closed() == b""
        await silent[-1].send(with_body(b"four"))
        assert (await silent[-1].reply()).body == b"4"


async def test_an_idle_connection_makes_room_for_a_new_one() -> None:
    async with Workshop(HttpSettings(max_connections=3)).serving() as server:
        idle = [await server.connect() for _ in range(2)]
        for client in idle:
            await client.send(with_body(b"one"))
            assert (await client.reply()).body == b"3"
        unused = await server.connect()
        await until(lambda: len(server.state.connections) == 3)
        newer = await server.connect()
        await newer.send(with_body(b"two"))
        assert (await newer.reply()).body == b"3"
        assert await idle[0].until_closed() == b"", "it has been idle for longest"
        await idle[1].send(with_body(b"four"))
        assert (await idle[1].reply()).body == b"4"
        await unused.send(with_body(b"first"))
        assert (await unused.reply()).body == b"5"


async def test_nothing_is_kept_of_idle_connections_that_are_gone() -> None:
    async with Workshop(HttpSettings()).serving() as server:
        client = await server.connect()
        await client.send(with_body(b"one"))
        await client.reply()
        (protocol,) = server.state.connections
        assert isinstance(protocol, connection.Connection)
        await until(lambda: [*protocol._idle] == [protocol])
        await client.close()
        await server.until_nothing_is_left()
        assert not protocol._idle


@pytest.mark.parametrize("path", ["/work", "/wait"])
async def test_a_connection_is_free_as_soon_as_it_is_gone(path: str) -> None:
    """And all of its last request: 16 bodies of 40 MB stayed until old objects were collected."""
    async with Workshop(HttpSettings()).serving() as server:
        client = await server.connect()
        await client.send(with_body(b"one", path=path))
        await until(lambda: server.state.total_requests or path == "/wait")
        kept = [weakref.ref(each) for each in server.state.connections]
        gc.disable()
        try:
            await client.close()
            await server.until_nothing_is_left()
            await until(lambda: kept[0]() is None)
        finally:
            gc.enable()


def write_certificate(directory: Path, name: str) -> list[str]:
    """The flags of a server with a new certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (directory / "key").write_bytes(key.private_bytes(pem, plain, serialization.NoEncryption()))
    (directory / "certificate").write_bytes(certificate.public_bytes(pem))
    return [f"--ssl-keyfile={directory / 'key'}", f"--ssl-certfile={directory / 'certificate'}"]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a server with a certificate."""
    return write_certificate(tmp_path_factory.mktemp("tls"), "localhost")


def trusting() -> ssl.SSLContext:
    """A client that takes any certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def test_handshakes_that_never_end_lock_nobody_out(
    tls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, "MAX_HANDSHAKES", 3)
    shop = Workshop(HttpSettings())
    async with serving(shop.app, shop.settings, *tls) as server:
        begun = [await server.connect() for _ in range(6)]
        for client in begun[:3]:
            assert await client.until_closed() == b""
        client = await server.connect(ssl=trusting())
        await client.send(with_body(b"one"))
        assert (await client.reply()).body == b"3"


async def test_all_of_this_holds_with_tls(tls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    context = trusting()
    monkeypatch.setattr(connection, "HEAD_S", 1.0)
    shop = Workshop(HttpSettings(max_body_mb=1, body_timeout_s=2, send_timeout_s=0.2))
    async with serving(shop.app, shop.settings, *tls) as server:
        client = await server.connect(ssl=context)
        for size in (3, 0, MB):
            await client.send(with_body(b"x" * size))
            assert (await client.reply()).body == b"%d" % size
        await client.close()
        for sent, status in (
            ((b"POST /",), 408),
            ((post("Content-Length: 5"), b"some"), 408),
            ((post(f"Content-Length: {8 * MB}"), bytes(4 * MB)), 413),
        ):
            client = await server.connect(ssl=context)
            await client.send(*sent)
            assert (await client.reply()).status == status
        await client.close()
        client = await server.connect(ssl=context, limit=1024)
        await client.send(with_body(b"", path="/stream"))
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await server.until_nothing_is_left()
    assert (shop.places, shop.memory) == (0, 0)


UPGRADE = (
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: a2V5",
    "Upgrade:",
)


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "anything"])
async def test_no_other_protocol_is_spoken(protocol: str) -> None:
    async with Workshop(HttpSettings()).serving() as server:
        headers = (*UPGRADE[:-1], f"{UPGRADE[-1]} {protocol}")
        assert (await server.ask(post(*headers, method="GET"))).body == b"0"
        upload = with_body(b"some\r\nUpgrade: text", *headers)
        assert (await server.ask(upload)).body == b"19"
        reply = await server.ask(with_body(b"one") + with_body(b"one", *headers))
        assert reply.status == 400 and "Upgrade" in reply.error()


async def test_a_server_that_stops_gives_all_memory_back() -> None:
    shop = Workshop(HttpSettings())
    async with shop.serving() as server:
        for _ in range(20):
            client = await server.connect()
            await client.send(post("Content-Length: 1000000"), bytes(1000))
        await until(lambda: shop.memory == 20_000)
    assert shop.memory == 0


async def test_who_sends_too_many_requests_ahead_is_told_when_to_come_back() -> None:
    async with Workshop(HttpSettings()).serving() as server:
        reply = await server.ask(with_body(b"1", path="/wait") * (connection.MAX_PIPELINED + 2))
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")


async def test_heads_may_be_as_large_as_vllms_flags_say() -> None:
    shop = Workshop(HttpSettings())
    flags = ("--h11-max-header-count=3", "--h11-max-incomplete-event-size=200")
    async with serving(shop.app, shop.settings, *flags) as server:
        few = (await server.ask(with_body(b"one"))).body
        many = await server.ask(with_body(b"one", *[f"H{n}: v" for n in range(3)]))
        large = await server.ask(with_body(b"one", f"H: {'v' * 200}"))
    assert few == b"3"
    assert (many.status, large.status) == (431, 431)
    assert "200 B or has more than 3 headers" in large.error()
    larger = "--h11-max-incomplete-event-size=200000"
    async with serving(shop.app, shop.settings, larger) as server:
        assert (await server.ask(with_body(b"one", f"H: {'v' * 100_000}"))).body == b"3"


async def test_idle_connections_stay_as_long_as_vllms_variable_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "1")
    async with Workshop(HttpSettings()).serving() as server:
        assert server.server.config.timeout_keep_alive == 1
    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
    async with Workshop(HttpSettings()).serving() as server:
        assert server.server.config.timeout_keep_alive == 75


async def test_tls_has_the_ciphers_that_the_flag_names(tls: list[str]) -> None:
    shop = Workshop(HttpSettings())
    cipher = "ECDHE-ECDSA-AES256-GCM-SHA384"
    context = trusting()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(shop.app, shop.settings, *tls, f"--ssl-ciphers={cipher}") as server:
        client = await server.connect(ssl=context)
        used = client.writer.get_extra_info("cipher")
        await client.close()
    assert used[0] == cipher


@pytest.mark.parametrize("wrong", ["--ssl-ciphers=NONE-SUCH", "--ssl-ca-certs=/nonexistent"])
async def test_tls_that_cannot_be_had_is_a_sentence(tls: list[str], wrong: str) -> None:
    shop = Workshop(HttpSettings())
    with pytest.raises(ConfigurationError, match="TLS can't be had"):
        async with serving(shop.app, shop.settings, *tls, wrong):
            pass


async def test_a_certificate_that_has_expired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = Authority(tmp_path / "ca").certify("127.0.0.1", days=-1)
    shop = Workshop(HttpSettings())
    flags = [f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}"]
    async with serving(shop.app, shop.settings, *flags):
        assert f"--ssl-certfile={certificate} expired at" in caplog.text


async def test_an_authority_of_clients_that_is_taken_out_is_trusted_no_more(tmp_path: Path) -> None:
    server_ca, old, new = (Authority(tmp_path / name) for name in ("server", "old", "new"))
    certificate, key = server_ca.certify("127.0.0.1")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.certificate.read_bytes())
    flags = [f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}", f"--ssl-ca-certs={trusted}"]
    shop = Workshop(HttpSettings())

    async def answers(authority: Authority) -> bool:
        context = trusting()
        context.load_cert_chain(*authority.certify("client"))
        try:
            client = await server.connect(ssl=context)
            await client.send(with_body(b"one"))
            reply = await client.reply()
        except (ConnectionError, EOFError, ssl.SSLError):
            return False
        await client.close()
        return reply.body == b"3"

    async with serving(
        shop.app, shop.settings, *flags, f"--ssl-cert-reqs={int(ssl.CERT_REQUIRED)}"
    ) as server:
        refresh = TlsRefresh(server.server.config)
        assert await answers(old) and not await answers(new)
        trusted.write_bytes(new.certificate.read_bytes())
        await refresh.look()
        assert await answers(new) and not await answers(old)


async def test_tls_follows_its_files(tmp_path: Path) -> None:
    flags = write_certificate(tmp_path, "before")
    shop = Workshop(HttpSettings())

    async def shown() -> bytes:
        client = await server.connect(ssl=trusting())
        der = client.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        await client.close()
        return bytes(der)

    async with serving(shop.app, shop.settings, *flags) as server:
        refresh = TlsRefresh(server.server.config)
        before = await shown()
        assert b"before" in before
        key = (tmp_path / "key").read_bytes()
        write_certificate(tmp_path, "after")
        new = (tmp_path / "key").read_bytes()
        (tmp_path / "key").write_bytes(key)  # the two don't fit
        await refresh.look()
        assert await shown() == before
        (tmp_path / "key").unlink()
        await refresh.look()
        assert await shown() == before
        (tmp_path / "key").write_bytes(new)
        await refresh.look()
        assert b"after" in await shown()
