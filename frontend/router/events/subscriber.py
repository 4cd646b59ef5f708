"""Subscribe to workers' KV events over ZMQ: one subscriber per worker, one line per rank.

Sockets and tasks only; ``event_stream.py`` decides. vLLM publishes on a PUB socket ``[topic,
sequence, payload]`` and answers on a ROUTER socket a request ``["", start]`` with ``["", topic,
sequence, payload]`` per buffered event, then a sequence of -1
(``vllm.distributed.kv_events.ZmqEventPublisher``).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ClassVar, Final, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from common.aio.supervised import CALM_S, FIRST_PAUSE_S, MAX_PAUSE_S
from common.backoff import Backoff
from common.errors import ProtocolError
from common.fleet_key import FleetKey
from common.identity import Target
from common.observability.telemetry import TASK_FAILURES
from common.request_plane.fleet_sockets import connect, frontend_context
from common.request_plane.loop_socket import LoopReader
from frontend.router.event_wire import END_OF_REPLAY, SEQUENCE_BYTES
from frontend.router.events.event_stream import SILENCE_S, EventStream, Replay
from frontend.router.events.progress import StreamStatistics
from frontend.router.index import BlockIndexes, IndexState, TargetBlocks, approximate
from frontend.router.inputs import EventSource, RoutableWorker

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 16 << 20
"""Bytes. A step of 64k tokens makes about 0.5 MB; a larger message is hostile."""

_RECEIVE_LIMIT = 100_000
"""Messages that ZMQ queues per socket."""

REPLAY_TIMEOUT_S: Final = 5.0
"""A worker answers readers between batches of events: longer silence means that it lost them."""

REPLAY_PAUSE_S: Final = 0.1
"""Minimum time between replays, each over a connection of its own."""

_SLICE_S = 0.001
"""Time for which messages are applied before the event loop runs other tasks."""


class Turns:
    """Fair lock, held with ``async with`` to apply one message; nothing may be awaited in it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._spent = 0.0
        self._began = 0.0

    async def come(self) -> None:
        """Wait for a turn that lasts until the caller's next await."""
        async with self._lock:
            await asyncio.sleep(0)

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        self._began = time.perf_counter()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spent += time.perf_counter() - self._began
        try:
            if self._spent > _SLICE_S:
                self._spent = 0.0
                await asyncio.sleep(0)
        finally:
            self._lock.release()


class ZmqFeeds:
    """Factory of a router's subscribers, over one ZMQ context.

    Times are in seconds: allowed silence of a serving rank, and time-out between messages of a
    replay. ``key`` is None for workers with plain sockets. Tests replace ``stream_type`` to inject
    faults.
    """

    stream_type: ClassVar[type[EventStream]] = EventStream

    def __init__(
        self,
        silence_s: float = SILENCE_S,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        key: FleetKey | None = None,
    ) -> None:
        self.silence_s = silence_s
        self.replay_timeout_s = replay_timeout_s
        self.clock = clock
        self.context = frontend_context(key)
        self.turns = Turns()

    def feed(self, worker: RoutableWorker, indexes: BlockIndexes) -> "KvEventSubscriber":
        return KvEventSubscriber(worker, indexes, self)

    def close(self) -> None:
        """Free the context. All subscribers must be closed."""
        self.context.destroy(linger=0)


class KvEventSubscriber:
    """Keep the indexes in step with one incarnation of a worker; its targets are registered."""

    def __init__(self, worker: RoutableWorker, indexes: BlockIndexes, feeds: ZmqFeeds) -> None:
        self._clock = feeds.clock
        self._lines = {
            source.rank: _Line(source, worker, indexes, feeds) for source in worker.event_sources
        }

    def start(self) -> None:
        for line in self._lines.values():
            line.start()

    async def close(self) -> None:
        """Stop listening. From the call on nothing is applied, even if it is cancelled."""
        for line in self._lines.values():
            line.stop()
        await asyncio.gather(*(line.close() for line in self._lines.values()))

    def state(self, rank: int) -> IndexState:
        line = self._lines.get(rank)
        if line is None:
            return approximate(f"the worker's card names no KV event source for rank {rank}")
        return line.stream.state

    def served(self, rank: int, routed_at: float) -> None:
        if rank in self._lines:
            self._lines[rank].stream.on_served(routed_at, self._clock())

    def emptied(self, at: float) -> None:
        now = self._clock()
        for line in self._lines.values():
            line.stream.on_emptied(at, now)

    def tick(self, now: float) -> None:
        for line in self._lines.values():
            line.stream.go_on()  # the task that applied it may be cancelled
            line.ask(line.stream.tick(now))

    def statistics(self) -> dict[int, StreamStatistics]:
        return {rank: line.stream.statistics() for rank, line in self._lines.items()}


class _Line:
    """Connections to one rank, and the tasks that read from them.

    On an unexpected error in one task the rank is unknown until all restart with a new stream.
    """

    def __init__(
        self, source: EventSource, worker: RoutableWorker, indexes: BlockIndexes, feeds: ZmqFeeds
    ) -> None:
        self._source = source
        self._worker = worker
        self._indexes = indexes
        self._feeds = feeds
        self._clock = feeds.clock
        self._turns = feeds.turns
        self._topic = source.topic.encode()
        self._closed = False
        self._backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, calm_s=CALM_S)
        self._began = self._clock()
        self._replaying: asyncio.Task[None] | None = None
        self._next_replay = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.stream = self._new_stream()

    def _new_stream(self) -> EventStream:
        worker = self._worker
        return self._feeds.stream_type(
            TargetBlocks(
                Target(worker.worker_id, self._source.rank),
                worker.block_size,
                worker.kv_tokens // worker.block_size,
                self._indexes,
            ),
            f"KV events of {worker.worker_id} rank {self._source.rank}",
            silence_s=self._feeds.silence_s,
        )

    def start(self) -> None:
        self._began = self._clock()
        self._spawn(self._listen(), "listen")

    def stop(self) -> None:
        self._closed = True
        self.stream.close()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def ask(self, question: Replay | None) -> None:
        """Start a replay if the stream asks for one, replacing the one before."""
        if question is None:
            return
        # The previous task may be the current one, which ends by itself.
        if self._replaying is not None and self._replaying is not asyncio.current_task():
            self._replaying.cancel()
        self._replaying = self._spawn(self._replay(question), "replay")

    async def _listen(self) -> None:
        await self._turns.come()
        with self._socket(zmq.SUB) as (socket, reader):
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            monitor: Any = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            watching = self._spawn(self._watch(monitor), "watch")
            try:
                connect(socket, self._source.endpoint)
                while True:
                    frames = await self._receive(reader)
                    async with self._turns:
                        if len(frames) != 3 or frames[0] != self._topic:
                            self.stream.on_foreign("frames", f"{len(frames)} frames")
                        else:
                            self.ask(self.stream.on_live(frames[1], frames[2], self._clock()))
                    await self._finish()
            finally:
                watching.cancel()
                # Before the sockets go: pyzmq reads by a pointer that is freed with them.
                await asyncio.gather(watching, return_exceptions=True)
                socket.disable_monitor()
                monitor.close()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.ask(self.stream.on_connected(self._clock()))
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self.stream.on_disconnected()

    async def _replay(self, question: Replay) -> None:
        """Request a replay over a fresh connection, so that no old answer mixes in."""
        endpoint = self._source.replay_endpoint
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._next_replay - loop.time()))
        self._next_replay = loop.time() + REPLAY_PAUSE_S
        await self._turns.come()
        with self._socket(zmq.DEALER) as (socket, reader):
            try:
                async with asyncio.timeout(self._feeds.replay_timeout_s) as limit:
                    connect(socket, endpoint)
                    asked = [b"", question.start.to_bytes(SEQUENCE_BYTES, "big")]
                    socket.send_multipart(asked, zmq.NOBLOCK)
                    while True:
                        frames = await self._receive(reader)
                        limit.reschedule(None)  # our own work is not the worker's delay
                        async with self._turns:
                            over = self._pass_on(question.attempt, frames)
                        await self._finish()
                        if over:
                            return
                        limit.reschedule(loop.time() + self._feeds.replay_timeout_s)
            except TimeoutError:
                why = f"replay endpoint {endpoint} does not answer"
                self.stream.on_replay_failed(question.attempt, why, self._clock())

    async def _finish(self) -> None:
        """Apply the rest of a large event in slices, letting other tasks run in between."""
        left = True
        while left and not self._closed:
            async with self._turns:
                left = self.stream.go_on()

    def _pass_on(self, attempt: int, frames: list[bytes]) -> bool:
        """Hand one message of a replay to the stream; return whether it was the last."""
        if len(frames) != 4 or (frames[1] != self._topic and frames[2] != END_OF_REPLAY):
            self.stream.on_foreign("frames", f"{len(frames)} frames in a replay")
            return False
        self.ask(self.stream.on_replayed(attempt, frames[2], frames[3], self._clock()))
        return frames[2] == END_OF_REPLAY

    async def _receive(self, reader: LoopReader) -> list[bytes]:
        """Return the frames of the next message; none if there are too many."""
        try:
            return [frame.bytes for frame in await reader.receive()]
        except ProtocolError:
            return []

    @contextmanager
    def _socket(self, kind: int) -> Iterator[tuple[zmq.Socket[bytes], LoopReader]]:
        made: Any = self._feeds.context.socket(kind, socket_class=cast(Any, zmq.Socket))
        with made as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
            # Heartbeats detect a dead host, which closes no connection.
            socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
            reader = LoopReader(socket)
            try:
                yield socket, reader
            finally:
                reader.stop()

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"KV events {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Treat the rank as approximate rather than stale after a task failed, then restart."""
        self._tasks.discard(task)
        if self._closed or task.cancelled() or (error := task.exception()) is None:
            return
        TASK_FAILURES.labels("KV events").inc()
        if isinstance(error, zmq.ZMQError):
            why = f"its event endpoints can't be used: {error}"
        else:
            why = f"following its events failed: {error!r}"
        logger.error(
            "%s, rank %d: %s", self._source.endpoint, self._source.rank, why, exc_info=error
        )
        self.stream.give_up(why)
        for other in self._tasks:
            other.cancel()
        pause = self._backoff.next_s(self._clock() - self._began)
        self._spawn(self._begin_again(pause), "begin again")

    async def _begin_again(self, pause: float) -> None:
        await asyncio.sleep(pause)
        self.stream.close()
        self.stream = self._new_stream()
        self.start()
