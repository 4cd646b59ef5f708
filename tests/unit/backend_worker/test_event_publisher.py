"""Over real sockets: whoever comes late learns what vLLM's publisher would not tell."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
import zmq.asyncio
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventPublisherFactory, KVCacheEvent, KVEventBatch

from backend_worker.kv_events.event_publisher import FleetEventPublisher, fleet_events
from frontend.router.event_wire import END_OF_REPLAY, decode_batch
from frontend.router.events.subscriber import ZmqFeeds
from frontend.router.inputs import EventSource
from tests.fakes.kv_events import cleared, frame, removed, stored
from tests.fakes.listener import Listener


class Worker:
    """A publisher as an engine makes it from a worker's settings."""

    def __init__(self, *, ours: bool = True, buffer_steps: int = 64) -> None:
        config: KVEventsConfig | None = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint="tcp://*:0",
            replay_endpoint="tcp://*:0",
            buffer_steps=buffer_steps,
        )
        if ours:
            config = fleet_events(config, None, None)
        self._publisher = EventPublisherFactory.create(config)
        assert isinstance(self._publisher, FleetEventPublisher) == ours
        bound = self._publisher.get_publisher_config()
        assert bound is not None
        assert bound.replay_endpoint is not None
        self.replay_endpoint: str = bound.replay_endpoint
        self.source = EventSource(0, bound.endpoint, bound.replay_endpoint)

    def publish(self, *events: KVCacheEvent) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    def fill(self) -> None:
        """Publish 1,000 batches, after which blocks 200 to 999 are held."""
        for number in range(1_000):
            self.publish(stored(number), *([removed(number - 800)] if number >= 800 else []))
        self._publisher._event_queue.join()

    async def ask(self, context: zmq.asyncio.Context, start: int = 0) -> list[tuple[int, bytes]]:
        """A replay, without its end."""
        with context.socket(zmq.DEALER) as socket:
            socket.connect(self.replay_endpoint)
            await socket.send_multipart([b"", frame(start)])
            found: list[tuple[int, bytes]] = []
            while True:
                _, _, number, payload = await asyncio.wait_for(socket.recv_multipart(), 60)
                if number == END_OF_REPLAY:
                    return found
                found.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self._publisher.shutdown()


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")


@pytest.fixture
def worker(on_loopback: None) -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
async def feeds() -> AsyncIterator[ZmqFeeds]:
    feeds = ZmqFeeds(silence_s=0.2, replay_timeout_s=5.0)
    yield feeds
    feeds.close()


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def test_who_comes_late_is_exact_and_goes_on(worker: Worker, feeds: ZmqFeeds) -> None:
    worker.fill()
    listener = Listener(feeds, worker.source)
    listener.subscriber.start()
    await listener.until(lambda: listener.exact() and listener.held(*range(200, 1_000)) == 800)
    assert not listener.held(199)
    worker.publish(removed(999), stored(5_000))
    await listener.until(lambda: listener.held(5_000) == 1)
    assert listener.held(*range(200, 1_000)) == 799
    assert listener.exact()
    statistics = listener.subscriber.statistics()[0]
    assert (statistics.gaps, statistics.losses) == (0, 0)
    assert listener.subscriber._lines[0].stream._progress.next == 1_001
    await listener.subscriber.close()


async def test_who_comes_late_to_vllms_publisher_is_never_exact(feeds: ZmqFeeds) -> None:
    worker = Worker(ours=False)
    worker.fill()
    listener = Listener(feeds, worker.source)
    listener.subscriber.start()
    await listener.until(lambda: "no longer replayed" in listener.subscriber.state(0).reason)
    await listener.until(lambda: listener.held(999) == 1)
    assert not listener.exact()
    assert not listener.held(500)
    await listener.subscriber.close()
    worker.close()


async def test_a_reader_of_vllms_protocol_gets_numbers_without_a_gap(
    worker: Worker, context: zmq.asyncio.Context
) -> None:
    worker.fill()
    for answer in await asyncio.gather(*(worker.ask(context, start) for start in (0, 0, 3, 500))):
        numbers = [number for number, _ in answer]
        assert numbers == list(range(numbers[0], 1_000))
        assert numbers[0] > 500
        assert decode_batch(answer[0][1]).begins_anew
        assert len(decode_batch(answer[-1][1]).changes) == 2  # the newest as it was published
    assert [number for number, _ in await worker.ask(context, 997)] == [997, 998, 999]
    assert await worker.ask(context, 1_000) == []


async def test_an_emptied_cache_is_known_to_be_empty(worker: Worker, feeds: ZmqFeeds) -> None:
    worker.fill()
    worker.publish(cleared())
    listener = Listener(feeds, worker.source)
    listener.subscriber.start()
    await listener.until(listener.exact)
    assert listener.held(999) == 0
    await listener.subscriber.close()


async def test_live_events_come_while_many_ask_again_and_again(
    worker: Worker, feeds: ZmqFeeds, context: zmq.asyncio.Context
) -> None:
    worker.fill()
    listener = Listener(feeds, worker.source)
    listener.subscriber.start()
    await listener.until(listener.exact)

    def publish() -> None:
        for number in range(2_000, 3_000):
            worker.publish(stored(number))

    publishing = threading.Thread(target=publish)
    publishing.start()
    askers = [asyncio.create_task(worker.ask(context)) for _ in range(30)]
    await listener.until(lambda: listener.held(*range(2_000, 3_000)) == 1_000)
    for asker in askers:
        answer = await asker
        numbers = [number for number, _ in answer]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
    publishing.join()
    assert listener.exact()
    await listener.subscriber.close()


async def test_strangers_and_those_who_leave_harm_nobody(
    worker: Worker, context: zmq.asyncio.Context
) -> None:
    worker.fill()
    for question in ([b""], [b"", b"short"], [b"", b"x" * 5_000], [b"", bytes(8), b"more"], [b"a"]):
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 1_000)
            socket.connect(worker.replay_endpoint)
            await socket.send_multipart(question)
    for _ in range(100):  # ask and go
        with context.socket(zmq.DEALER) as socket:
            socket.connect(worker.replay_endpoint)
            await socket.send_multipart([b"", bytes(8)])
    assert (await worker.ask(context))[-1][0] == 999


async def test_a_batch_that_cannot_be_encoded_is_missed_by_nobody(
    worker: Worker, feeds: ZmqFeeds
) -> None:
    worker.publish(stored(1))
    listener = Listener(feeds, worker.source)
    listener.subscriber.start()
    await listener.until(lambda: listener.exact() and listener.held(1) == 1)
    worker.publish(stored(2, session_id="\ud800"))
    worker.publish(stored(3))
    worker.publish(stored(4, lora_name="a"))
    await listener.until(lambda: listener.exact() and listener.held(4) == 1)
    assert listener.held(1) == listener.held(3) == 1
    await listener.subscriber.close()
