"""vLLM's client of an engine reads our socket as it reads pyzmq's."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, core_client
from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources, MPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from backend_worker.engine import outputs as engine_outputs
from backend_worker.engine.outputs import EngineOutputs
from tests.waiting import until


class Client(AsyncMPClient):
    """Without an engine: vLLM's task that reads what one says, and our socket."""

    def __init__(self, context: zmq.asyncio.Context, path: str) -> None:
        self.resources = BackgroundResources(ctx=context)
        self.resources.output_socket = core_client.make_zmq_socket(context, path, zmq.PULL)
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.utility_results: dict[int, Any] = {}
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
async def client(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    monkeypatch.setattr(core_client, "make_zmq_socket", core_client.make_zmq_socket)
    engine_outputs.install()
    made = Client(context, "inproc://outputs")
    yield made
    made.resources()


@pytest.fixture
async def engine(client: Client, context: zmq.asyncio.Context) -> AsyncIterator[zmq.Socket[bytes]]:
    with zmq.Socket(context, zmq.PUSH) as socket:
        socket.connect("inproc://outputs")
        yield socket


def said(number: int) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput(f"r{number}", [number])])


async def answer(client: Client) -> EngineCoreOutputs:
    async with asyncio.timeout(60):
        return await client.get_output_async()


def test_vllm_makes_its_socket_here() -> None:
    assert "make_zmq_socket" in MPClient.__init__.__code__.co_names


async def test_only_the_socket_for_outputs_is_ours(
    client: Client, context: zmq.asyncio.Context
) -> None:
    assert type(client.resources.output_socket) is EngineOutputs
    with core_client.make_zmq_socket(context, "inproc://in", zmq.ROUTER, bind=True) as asked:
        assert type(asked) is zmq.asyncio.Socket
    of_threads = zmq.Context()
    with of_threads, core_client.make_zmq_socket(of_threads, "inproc://x", zmq.PULL) as pulled:
        assert type(pulled) is zmq.Socket


async def test_outputs_come_in_order(client: Client, engine: zmq.Socket[bytes]) -> None:
    for number in range(100):
        engine.send_multipart(MsgpackEncoder().encode(said(number)), copy=False)
    for number in range(100):
        assert (await answer(client)).outputs[0].new_token_ids == [number]
    later = asyncio.create_task(answer(client))
    await asyncio.sleep(0)
    engine.send_multipart(MsgpackEncoder().encode(said(100)), copy=False)
    assert (await later).outputs[0].request_id == "r100"


async def test_an_engine_that_dies_is_told(client: Client, engine: zmq.Socket[bytes]) -> None:
    waiting = asyncio.create_task(answer(client))
    engine.send(core_client.EngineCoreProc.ENGINE_CORE_DEAD)
    with pytest.raises(EngineDeadError):
        await waiting
    assert client.resources.engine_dead


async def test_whoever_waits_when_it_is_closed_hears_of_it(client: Client) -> None:
    waiting = asyncio.create_task(answer(client))
    socket = client.resources.output_socket
    assert isinstance(socket, EngineOutputs)
    await until(lambda: socket._loop_reader and socket._loop_reader._watching)
    client.resources()
    with pytest.raises(EngineDeadError):
        await waiting
    assert socket.closed


async def test_nothing_is_read_by_the_pointer_of_a_socket_that_was_closed(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ frees it, and what is asked there then may be another socket."""
    with zmq.Socket(context, zmq.PUSH) as engine, EngineOutputs(context, zmq.PULL) as socket:
        socket.bind("inproc://outputs")
        engine.connect("inproc://outputs")
        waiting = asyncio.ensure_future(socket.recv_multipart(copy=False))
        await until(lambda: socket._loop_reader and socket._loop_reader.waited_for)
        assert socket._loop_reader is not None
        engine.send(b"x")
        while not socket._loop_reader.look():
            pass
        socket.close(0)
        monkeypatch.setattr(socket._loop_reader, "_plain", None)  # whoever reads by it fails
        await asyncio.wait([waiting], timeout=60)
        assert waiting.cancelled()
        with pytest.raises(zmq.ZMQError):
            await socket.recv_multipart(copy=False)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_can_be_closed_after_its_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """vLLM does so in the end, from wherever its client is collected, while its task waits."""
    context = zmq.asyncio.Context()
    socket = EngineOutputs(context, zmq.PULL)
    loop = new_loop()

    async def begin() -> Coroutine[Any, None, list[zmq.Frame]]:
        reading = socket.recv_multipart(copy=False)
        reading.send(None)
        return reading

    reading = loop.run_until_complete(begin())
    loop.close()
    socket.close()
    assert socket.closed
    reading.close()
    context.destroy(linger=0)


async def test_an_engine_that_is_ahead_leaves_turns_to_others(
    client: Client, engine: zmq.Socket[bytes]
) -> None:
    for number in range(100):
        engine.send_multipart(MsgpackEncoder().encode(said(number)), copy=False)
    client._ensure_output_queue_task()
    turns = 0
    while client.outputs_queue.qsize() < 100:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 100
