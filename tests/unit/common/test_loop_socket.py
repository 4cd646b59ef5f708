"""Whatever has come is read, and nobody is called for nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
import zmq
import zmq.asyncio

from common.errors import ProtocolError
from common.request_plane import loop_socket
from common.request_plane.loop_socket import LoopReader, LoopSocket
from tests.waiting import until


@pytest.fixture(params=[asyncio.run, uvloop.run])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    """Both loops: uvloop is what frontend and worker run on."""
    runner: Callable[[Awaitable[None]], None] = request.param
    return runner


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[LoopSocket, zmq.asyncio.Socket]]:
    """One of ours, and pyzmq's own at the other end."""
    context = zmq.asyncio.Context()
    socket = LoopSocket(context, zmq.DEALER, {zmq.LINGER: 0}, zmq.EVENT_DISCONNECTED)
    port = socket.plain.bind_to_random_port("tcp://127.0.0.1")
    other = context.socket(zmq.DEALER)
    other.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield socket, other
    finally:
        socket.close(0)
        context.destroy(linger=0)


async def received(socket: LoopSocket) -> list[bytes]:
    async with asyncio.timeout(60):
        return [frame.bytes for frame in await socket.receive()]


async def woken(socket: LoopSocket, other: zmq.asyncio.Socket) -> asyncio.Task[list[bytes]]:
    """Whoever reads, woken by ``x`` and before his turn."""
    waiting = asyncio.create_task(received(socket))
    await until(lambda: socket._reader._reader)
    zmq.Socket.shadow(other).send(b"x")
    while not socket.readable:  # no turn of the loop until it is there
        pass
    return waiting


def test_messages_come_whole_and_in_order(run: Callable[[Awaitable[None]], None]) -> None:
    async def check() -> None:
        async with pair() as (socket, other):
            for number in range(300):
                await other.send_multipart([b"%d" % number, bytes(number)])
            for number in range(300):
                assert await received(socket) == [b"%d" % number, bytes(number)]
            waiting = asyncio.create_task(received(socket))
            await asyncio.sleep(0)
            socket.send([b"your turn"])
            assert await other.recv_multipart() == [b"your turn"]
            await other.send(b"late")
            assert await waiting == [b"late"]

    run(check())


def test_a_message_of_too_many_frames_is_dropped(
    run: Callable[[Awaitable[None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_socket, "MAX_FRAMES", 8)

    async def check() -> None:
        async with pair() as (socket, other):
            for number in (8, 9, 5_000, 8):
                await other.send_multipart([b"x"] * number)
            assert len(await received(socket)) == 8
            for _ in range(2):
                with pytest.raises(ProtocolError, match="more than 8 frames"):
                    await received(socket)
            assert len(await received(socket)) == 8

    run(check())


def test_a_send_hides_nothing_that_has_come(run: Callable[[Awaitable[None]], None]) -> None:
    """ZMQ tells once that something has come, and whoever sends may be told instead."""

    async def check() -> None:
        async with pair() as (socket, other):
            waiting = asyncio.create_task(received(socket))
            await until(lambda: socket._reader._reader)
            plain: zmq.Socket[bytes] = zmq.Socket.shadow(other)
            for turn in range(50):
                plain.send(b"%d" % turn)
                # No turn of the loop until it is there; to look is to be told.
                while not socket.readable:
                    pass
                socket.send([b"unrelated"])
                assert await waiting == [b"%d" % turn]
                waiting = asyncio.create_task(received(socket))
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])

    run(check())


def test_a_send_without_room_hides_nothing_either(
    run: Callable[[Awaitable[None]], None],
) -> None:
    async def check() -> None:
        async with pair() as (socket, other):
            await other.send(b"hello")
            assert await received(socket) == [b"hello"]
            waiting = asyncio.create_task(received(socket))
            await asyncio.sleep(0)
            zmq.Socket.shadow(other).send(b"more")
            while not socket.readable:
                pass
            with pytest.raises(zmq.Again):
                while True:
                    socket.send([bytes(1 << 16)])
            assert await waiting == [b"more"]

    run(check())


def test_nobody_is_called_for_what_nobody_wants(run: Callable[[Awaitable[None]], None]) -> None:
    async def check() -> None:
        async with pair() as (socket, other):
            waiting = asyncio.create_task(received(socket))
            await other.send(b"one")
            assert await waiting == [b"one"]
            assert not socket.readable  # ZMQ tells only whoever has found nothing
            await other.send(b"two")
            await until(lambda: socket._reader._watching is None)
            assert await received(socket) == [b"two"]
            waiting = asyncio.create_task(received(socket))
            await asyncio.sleep(0)
            await other.send(b"three")
            assert await waiting == [b"three"]

    run(check())


def test_closing_ends_the_wait_of_whoever_reads(run: Callable[[Awaitable[None]], None]) -> None:
    async def check() -> None:
        async with pair() as (socket, _):
            waiting = asyncio.create_task(received(socket))
            await until(lambda: socket._reader._watching)
            socket.close(0)
            socket.close(0)
            await asyncio.wait([waiting], timeout=60)
            assert waiting.cancelled()
            assert socket.closed and socket.monitor.closed and socket._reader._watching is None

    run(check())


def test_closing_ends_the_wait_of_whoever_was_woken_too(
    run: Callable[[Awaitable[None]], None],
) -> None:
    """Before its turn has come: then there is no socket to read any more."""

    async def check() -> None:
        async with pair() as (socket, other):
            waiting = await woken(socket, other)
            socket.close(0)
            await asyncio.wait([waiting], timeout=60)
            assert waiting.cancelled()
            with pytest.raises(zmq.ZMQError):
                await received(socket)

    run(check())


def test_whoever_gives_up_leaves_the_message_to_the_next(
    run: Callable[[Awaitable[None]], None],
) -> None:
    async def check() -> None:
        async with pair() as (socket, other):
            for number in range(20):
                waiting = asyncio.create_task(received(socket))
                await asyncio.sleep(0)
                await other.send(b"%d" % number)
                while not (socket.readable or waiting.done()):  # noqa: ASYNC110 # turn by turn
                    await asyncio.sleep(0)
                waiting.cancel()
                (done,), _ = await asyncio.wait([waiting])
                if done.cancelled():
                    assert await received(socket) == [b"%d" % number]
                else:
                    assert done.result() == [b"%d" % number]

    run(check())


def test_whoever_asks_takes_nothing_from_whoever_waits(
    run: Callable[[Awaitable[None]], None],
) -> None:
    async def check() -> None:
        async with pair() as (socket, other):
            waiting = await woken(socket, other)
            assert await waiting == [b"x"]

    run(check())


def test_the_next_reader_is_not_forgotten_with_the_one_before(
    run: Callable[[Awaitable[None]], None],
) -> None:
    async def check() -> None:
        async with pair() as (socket, other):
            waiting = asyncio.create_task(received(socket))
            await until(lambda: socket._reader._reader)
            waiting.cancel()  # which it hears of after the next has begun
            asyncio.get_running_loop().call_later(0.05, zmq.Socket.shadow(other).send, b"x")
            assert await received(socket) == [b"x"]
            assert waiting.cancelled()

    run(check())


def test_a_context_that_closes_it_leaves_nobody_waiting(
    run: Callable[[Awaitable[None]], None],
) -> None:
    async def check() -> None:
        async with pair() as (socket, _):
            waiting = asyncio.create_task(received(socket))
            await until(lambda: socket._reader._reader)
            socket.plain.context.destroy(linger=0)
            socket.close(0)
            await asyncio.wait([waiting], timeout=60)
            assert waiting.cancelled() and socket._reader._watching is None

    run(check())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_is_read_on_one_loop_after_another(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as pull,
        context.socket(zmq.PUSH) as push,
    ):
        pull.bind("inproc://x")
        push.connect("inproc://x")
        reader = LoopReader(pull)

        async def read() -> list[bytes]:
            asyncio.get_running_loop().call_later(0.05, push.send, b"x")
            async with asyncio.timeout(60):
                return [frame.bytes for frame in await reader.receive()]

        for _ in range(2):
            loop = new_loop()
            assert loop.run_until_complete(read()) == [b"x"]
            loop.close()
