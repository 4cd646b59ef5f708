"""Over real sockets, with a worker's own publisher."""

import asyncio
import errno
import itertools
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio
from prometheus_client import REGISTRY
from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch

from backend_worker.kv_events.event_publisher import FleetEventPublisher
from common.observability.telemetry import TASK_FAILURES
from common.request_plane import loop_socket
from frontend.router.event_wire import END_OF_REPLAY
from frontend.router.events import subscriber as events
from frontend.router.events.event_stream import EventStream, Replay
from frontend.router.events.subscriber import KvEventSubscriber, ZmqFeeds
from frontend.router.index import indexes
from frontend.router.index.indexes import BlockIndexes, Knowledge, TargetBlocks
from frontend.router.index.kv_index import KvIndex
from frontend.router.inputs import EventSource, RoutableWorker
from frontend.router.router import Router
from frontend.workers.contract import Refusals
from frontend.workers.gauges import show_workers
from frontend.workers.members import Departures, Members
from tests.fakes.feeds import ScriptedFeeds
from tests.fakes.kv_events import blocks, encode, frame, removed, stored
from tests.fakes.listener import Listener, W
from tests.ports import free_port


def await_free(port: int) -> None:
    """Wait until a port can be bound: ZMQ frees it a moment after a socket's end."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return
        time.sleep(0.02)


class Worker:
    """A publisher at endpoints that stay the same over restarts."""

    def __init__(self, *, rank: int = 0) -> None:
        self._ports = [free_port(), free_port()]
        live, replay = (f"tcp://127.0.0.1:{port}" for port in self._ports)
        self.source = EventSource(rank, live, replay, "kv")
        self._publisher = self._start()

    def _start(self) -> FleetEventPublisher:
        for port in self._ports:
            await_free(port)
        # Rank 0 always: the publisher would add its rank to the port.
        live, replay = (f"tcp://*:{port}" for port in self._ports)
        return FleetEventPublisher(
            0, key_file="", endpoint=live, replay_endpoint=replay, buffer_steps=1000, topic="kv"
        )

    def publish(self, *published: KVCacheEvent) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=list(published)))

    def stop(self) -> None:
        self._publisher.shutdown()

    def restart(self) -> None:
        self.stop()
        self._publisher = self._start()


@contextmanager
def running(worker: Worker) -> Iterator[Worker]:
    try:
        yield worker
    finally:
        worker.stop()


@pytest.fixture
async def feeds(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ZmqFeeds]:
    """Closes its subscribers even if the test fails: they would go on in later tests' sockets."""
    made = ZmqFeeds(silence_s=0.2, replay_timeout_s=0.5)
    feed, subscribers = made.feed, []

    def remembered(worker: RoutableWorker, indexes: BlockIndexes) -> KvEventSubscriber:
        subscribers.append(feed(worker, indexes))
        return subscribers[-1]

    monkeypatch.setattr(made, "feed", remembered)
    yield made
    for subscriber in subscribers:
        await subscriber.close()
    made.close()


async def test_blocks_from_before_and_after_subscribing(feeds: ZmqFeeds) -> None:
    with running(Worker()) as worker:
        worker.publish(stored(1, 2))
        listener = Listener(feeds, worker.source)
        listener.subscriber.start()
        worker.publish(stored(3))
        assert listener.subscriber.state(0).knowledge is Knowledge.DEGRADED
        await listener.until(lambda: listener.exact() and listener.held(1, 2, 3) == 3)
        worker.publish(removed(2))
        await listener.until(lambda: listener.held(1, 2, 3) == 1)
        assert listener.exact()
        await listener.subscriber.close()
        worker.publish(stored(2))
        await asyncio.sleep(0.1)
        assert listener.held(1, 2) == 1


async def test_metrics_tell_of_streams_that_there_are(feeds: ZmqFeeds) -> None:
    def figure(name: str) -> float | None:
        labels = {"worker_id": W, "rank": "0"}
        return REGISTRY.get_sample_value(f"mmrouter_kv_event_{name}", labels)

    with running(Worker()) as worker:
        listener = Listener(feeds, worker.source)
        router = Router(feeds=ScriptedFeeds())
        fleets: Any = [SimpleNamespace(router=router, members=Members())]
        show_workers(fleets, Refusals(), Departures())
        router.roster.feeds[W] = listener.subscriber
        assert (figure("batches_total"), figure("gaps_total"), figure("losses_total")) == (0, 0, 0)
        assert figure("lag_seconds") is None
        listener.subscriber.start()
        worker.publish(stored(1))
        await listener.until(lambda: listener.exact() and listener.held(1) == 1)
        worker.publish(stored(2))
        await listener.until(lambda: listener.held(1, 2) == 2)
        assert figure("batches_total") == 2
        lag = figure("lag_seconds")
        assert lag is not None and lag >= 0
        fleets.clear()
        assert figure("batches_total") is None


async def test_live_messages_that_are_lost_before_they_are_read(
    feeds: ZmqFeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_lose = 3

    class LossyStream(EventStream):
        def on_live(self, sequence_frame: bytes, payload: bytes, now: float) -> Replay | None:
            nonlocal to_lose
            if to_lose:
                to_lose -= 1
                return None
            return super().on_live(sequence_frame, payload, now)

    monkeypatch.setattr(ZmqFeeds, "stream_type", LossyStream)
    with running(Worker()) as worker:
        listener = Listener(feeds, worker.source)
        listener.subscriber.start()
        published = 0

        def all_lost() -> bool:
            nonlocal published
            worker.publish(stored(published))
            published += 1
            return not to_lose

        await listener.until(all_lost)
        worker.publish(stored(published))
        numbers = range(published + 1)
        await listener.until(lambda: listener.exact() and listener.held(*numbers) == len(numbers))


async def test_others_get_their_turn_after_each_message_that_takes_long(
    feeds: ZmqFeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, at = 0, list[int]()

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    class SlowStream(EventStream):
        def on_live(self, sequence_frame: bytes, payload: bytes, now: float) -> Replay | None:
            at.append(turns)
            time.sleep(0.003)  # meanwhile the next ones come
            return super().on_live(sequence_frame, payload, now)

    monkeypatch.setattr(ZmqFeeds, "stream_type", SlowStream)
    with running(Worker()) as worker:
        listener = Listener(feeds, worker.source)
        listener.subscriber.start()
        await listener.until(listener.exact)
        counting = asyncio.create_task(count_turns())
        for number in range(30):
            worker.publish(stored(number))
        await listener.until(lambda: listener.held(*range(30)) == 30)
        counting.cancel()
    assert len(at) > 1
    assert all(before < after for before, after in itertools.pairwise(at))


async def test_more_events_than_are_kept(feeds: ZmqFeeds) -> None:
    with running(Worker()) as worker:
        for number in range(3_000):
            worker.publish(stored(number))
        listener = Listener(feeds, worker.source)
        listener.subscriber.start()
        await listener.until(lambda: listener.held(*range(3_000)) == 3_000)
        await listener.until(listener.exact)
        await listener.subscriber.close()


async def test_a_restart_in_place(feeds: ZmqFeeds) -> None:
    with running(Worker()) as worker:
        worker.publish(stored(1))
        worker.publish(stored(2))
        listener = Listener(feeds, worker.source)
        listener.subscriber.start()
        await listener.until(lambda: listener.exact() and listener.held(1, 2) == 2)
        await asyncio.to_thread(worker.restart)
        worker.publish(stored(7))
        worker.publish(stored(8))
        await listener.until(lambda: listener.exact() and listener.held(7, 8) == 2)
        assert listener.held(1) == listener.held(2) == 0
        await listener.subscriber.close()


async def test_a_worker_that_is_not_there(feeds: ZmqFeeds) -> None:
    live, replay = free_port(), free_port()
    source = EventSource(0, f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}")
    listener = Listener(feeds, source)
    listener.subscriber.start()
    await listener.until(lambda: "no connection" in listener.subscriber.state(0).reason)
    await listener.subscriber.close()


async def test_a_replay_endpoint_that_is_not_there(feeds: ZmqFeeds) -> None:
    with running(Worker()) as worker:
        nowhere = f"tcp://127.0.0.1:{free_port()}"
        listener = Listener(feeds, replace(worker.source, replay_endpoint=nowhere))
        listener.subscriber.start()
        await listener.until(lambda: "does not answer" in listener.subscriber.state(0).reason)
        assert listener.subscriber.state(0).knowledge is Knowledge.APPROXIMATE
        await listener.subscriber.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://"])
async def test_endpoints_that_zmq_refuses(feeds: ZmqFeeds, endpoint: str) -> None:
    listener = Listener(feeds, EventSource(0, endpoint, endpoint))
    listener.subscriber.start()
    await listener.until(lambda: "can't be used" in listener.subscriber.state(0).reason)
    assert listener.subscriber.state(0).knowledge is Knowledge.APPROXIMATE
    await listener.subscriber.close()


async def test_every_rank_has_a_line_of_its_own(feeds: ZmqFeeds) -> None:
    with running(Worker(rank=0)) as zero, running(Worker(rank=1)) as one:
        listener = Listener(feeds, zero.source, one.source)
        listener.subscriber.start()
        zero.publish(stored(1, 2))
        one.publish(stored(1))
        await listener.until(lambda: listener.exact(0) and listener.exact(1))
        await listener.until(lambda: listener.index.match(blocks(1, 2)) == {(W, 0): 2, (W, 1): 1})
        assert "rank 5" in listener.subscriber.state(5).reason
        await listener.subscriber.close()


async def test_a_large_event_is_applied_to_its_end(
    feeds: ZmqFeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, also where it is the last that comes, and none of them after the worker's end."""
    monkeypatch.setattr(indexes, "SLICE_BLOCKS", 4)
    with running(Worker()) as worker:
        listener = Listener(feeds, worker.source)
        listener.subscriber.start()
        await listener.until(listener.exact)
        worker.publish(stored(*range(100)))
        await listener.until(lambda: listener.index.match(blocks(*range(100))) == {(W, 0): 100})
        await listener.subscriber.close()


async def test_hostile_messages(feeds: ZmqFeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MAX_MESSAGE", 10_000)
    monkeypatch.setattr(loop_socket, "MAX_FRAMES", 100)
    context = zmq.asyncio.Context()
    publisher, replays = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (publisher, replays)]
    listener = Listener(feeds, EventSource(0, *(f"tcp://127.0.0.1:{port}" for port in ports)))
    listener.subscriber.start()

    async def answer(*messages: tuple[bytes, ...]) -> None:
        """Answer a question with nothing but these."""
        async with asyncio.timeout(60):
            name, _, _ = await replays.recv_multipart()
        for message in (*messages, (b"", b"", END_OF_REPLAY, b"")):
            await replays.send_multipart([name, *message])

    async def send(*frames: bytes) -> None:
        await publisher.send_multipart(frames)

    asked = asyncio.create_task(
        answer((b"",), (b"", b"topic", frame(0), b""), (b"", b"", b"short", b""), *[(b"",) * 500])
    )
    await listener.until(lambda: asked.done() and listener.exact())
    await send(b"")
    await send(b"", frame(0))
    await send(b"topic", frame(0), b"")
    await send(*[b""] * 5_000)
    await send(b"", b"short", b"")
    await send(b"", frame(0), b"\xff" * 100)
    await send(b"", frame(0), b"\x93" + b"\x91" * 5_000)
    await send(b"", frame(0), encode([stored(7)], time=1.0))
    await listener.until(lambda: listener.held(7) == 1)
    assert listener.exact()
    malformed = listener.subscriber.statistics()[0].malformed
    assert malformed == {"frames": 7, "sequence": 2, "payload": 2}
    # Beyond the size limit ZMQ drops the connection for good: all is forgotten.
    await send(b"", frame(1), b"x" * 20_000)
    await listener.until(lambda: not listener.exact())
    assert listener.held(7) == 0
    await listener.subscriber.close()
    context.destroy(linger=0)


async def test_a_task_that_fails_leaves_the_worker_approximate(
    feeds: ZmqFeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Worker()) as worker:
        worker.publish(stored(1))
        listener = Listener(feeds, worker.source)
        listener.subscriber.start()
        await listener.until(lambda: listener.exact() and listener.held(1) == 1)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("a bug of ours")

        monkeypatch.setattr(KvIndex, "store", fail)
        worker.publish(stored(2))
        await listener.until(lambda: "a bug of ours" in listener.subscriber.state(0).reason)
        assert listener.subscriber.state(0).knowledge is Knowledge.APPROXIMATE
        assert listener.held(1) == 0
        await listener.subscriber.close()


async def test_too_many_open_files_are_survived(
    feeds: ZmqFeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any error that nobody expected: nothing is known meanwhile, and then all of it."""
    monkeypatch.setattr(events, "FIRST_PAUSE_S", 0.05)
    full = zmq.ZMQError(errno.EMFILE)
    before = TASK_FAILURES.labels("KV events")._value.get()
    with running(Worker()) as worker:
        worker.publish(stored(1, 2))
        listener = Listener(feeds, worker.source)
        with monkeypatch.context() as patch:

            def fails(*_: object, **__: object) -> zmq.asyncio.Socket:
                raise full

            patch.setattr(zmq.asyncio.Context, "socket", fails)
            listener.subscriber.start()
            await listener.until(
                lambda: TASK_FAILURES.labels("KV events")._value.get() >= before + 2
            )
            await listener.until(
                lambda: listener.subscriber.state(0).knowledge is Knowledge.APPROXIMATE
            )
            assert listener.held(1, 2) == 0
        await listener.until(lambda: listener.exact() and listener.held(1, 2) == 2)
        # And in the middle of it, by an event that we stumble over.
        with monkeypatch.context() as patch:

            def stumbles(*_: object) -> None:
                raise RuntimeError("a mistake")

            patch.setattr(TargetBlocks, "apply", stumbles)
            worker.publish(stored(3))
            await listener.until(
                lambda: listener.subscriber.state(0).knowledge is Knowledge.APPROXIMATE
            )
        await listener.until(lambda: listener.exact() and listener.held(1, 2, 3) == 3)
        await listener.subscriber.close()


async def test_closing_between_two_tries_leaves_no_task(
    feeds: ZmqFeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Worker()) as worker:
        listener = Listener(feeds, worker.source)
        with monkeypatch.context() as patch:

            def fails(*_: object, **__: object) -> zmq.asyncio.Socket:
                raise zmq.ZMQError(errno.EMFILE)

            patch.setattr(zmq.asyncio.Context, "socket", fails)
            listener.subscriber.start()
            await listener.until(
                lambda: listener.subscriber.state(0).knowledge is Knowledge.APPROXIMATE
            )
        await listener.subscriber.close()
        left = {task.get_name() for task in asyncio.all_tasks()}
        assert not [name for name in left if name.startswith("KV events")]


async def test_one_replay_follows_another_after_a_pause(
    feeds: ZmqFeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose events have gaps made a frontend open 900 connections a second."""
    opened: list[int] = []
    open_socket = events._Line._socket

    def opening(line: events._Line, kind: int) -> Any:
        opened.append(kind)
        return open_socket(line, kind)

    monkeypatch.setattr(events._Line, "_socket", opening)
    monkeypatch.setattr(events, "REPLAY_PAUSE_S", 3600.0)
    with running(Worker()) as worker:
        listener = Listener(feeds, worker.source)
        listener.subscriber.start()
        await listener.until(listener.exact)
        line = listener.subscriber._lines[0]
        for attempt in range(3):
            line.ask(Replay(100 + attempt, 0))
            await asyncio.sleep(0)
        await line._turns.come()
        assert opened.count(zmq.DEALER) == 1
