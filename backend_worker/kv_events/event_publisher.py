"""The one file that touches vLLM's KV event publisher.

vLLM's publisher runs in the engine's process, knows no encryption, and replays only the last
batches: a late reader never learns of earlier blocks. Ours is a subclass that puts the fleet key,
if any, on the sockets and can send a snapshot (``event_log.py``). Endpoints, numbering and buffer
stay vLLM's.

A reader sends ``["", number]`` to a ROUTER socket. Each batch comes as ``["", topic, number,
payload]``; the number -1 ends the replay.
"""

import dataclasses
import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Final, Literal

import msgspec
import zmq
from vllm.config import KVEventsConfig, config
from vllm.distributed.kv_events import EventPublisherFactory, KVEventBatch, ZmqEventPublisher

from backend_worker.kv_events.event_log import LEAST_KEPT, EventLog, Message
from common.fleet_key import FleetKey
from common.observability.telemetry import TASK_FAILURES
from common.request_plane.fleet_sockets import Gate, check_bind

logger = logging.getLogger(__name__)

QUEUED: Final = 64  # messages queued by ZMQ for one reader; further ones wait
LARGEST_REQUEST: Final = 1024  # bytes
_AT_ONCE: Final = 64  # readers answered concurrently; further ones wait in the socket
_TURN_S: Final = 0.001  # how long a turn may take, in seconds, but for its last message
_STUCK_S: Final = 30.0  # how long a reader may take nothing before it is given up, in seconds

_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


@dataclass(slots=True)
class _Reader:
    """A reader with a pending replay. ``left`` is None before the answer is known; ``moved`` is the
    time of the last message sent, in monotonic seconds."""

    start: int
    left: deque[Message] | None
    moved: float


class Replays:
    """Replays to the readers of one rank. For one thread. Sets ROUTER_MANDATORY, so that a full
    queue or a disconnected reader is an error."""

    def __init__(self, socket: zmq.Socket[bytes], topic: bytes, log: EventLog) -> None:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket = socket
        self._topic = topic
        self._log = log
        self._readers: dict[bytes, _Reader] = {}

    def turn(self) -> bool:
        """Read requests and send for one time slice; return whether readers still wait."""
        ends = time.monotonic() + _TURN_S
        self._take_questions()
        while self._log.work() and time.monotonic() < ends:
            pass
        for name in list(self._readers):
            self._serve(name, ends)
            if time.monotonic() > ends:
                break
        return bool(self._readers)

    def _take_questions(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._readers) >= _AT_ONCE or not self._socket.poll(0):
                return
            frames = self._socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
                logger.warning("ignored a malformed replay request of %d frames", len(frames))
                continue
            start = int.from_bytes(frames[2], "big")
            # A repeated request replaces the earlier one.
            self._readers.pop(frames[0], None)
            self._readers[frames[0]] = _Reader(start, None, time.monotonic())

    def _serve(self, name: bytes, ends: float) -> None:
        """Send to one reader, and requeue it behind the other readers."""
        reader = self._readers.pop(name)
        try:
            done = self._send(name, reader, ends)
        except zmq.Again:
            done = time.monotonic() - reader.moved > _STUCK_S
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            done = True
        if not done:
            self._readers[name] = reader

    def _send(self, name: bytes, reader: _Reader, ends: float) -> bool:
        """Send until the time slice ends; return whether the reader has everything."""
        if reader.left is None:
            answer = self._log.answer(reader.start)
            if answer is None:
                return False
            reader.left = deque(answer)
        while reader.left:
            number, payload = reader.left[0]
            frames = (name, b"", self._topic, number.to_bytes(_NUMBER_BYTES, "big"), payload)
            self._socket.send_multipart(frames, zmq.DONTWAIT)
            reader.left.popleft()
            reader.moved = time.monotonic()
            if reader.moved > ends:
                return False
        self._socket.send_multipart((name, b"", b"", _END, b""), zmq.DONTWAIT)
        return True


_encode = msgspec.msgpack.Encoder().encode
_NAME = "mmrouter"
_ANY_PORT = "tcp://*:0"

_IDLE_S = 0.1  # how long a question may wait, in seconds, while the engine does nothing
_BUSY_S = 0.001  # the same while readers are answered. The engine's other threads run meanwhile
_LIVE_FIRST = 16  # batches published, if so many wait, before readers get their turn
_PAUSE_S = 0.1  # after an unexpected error, in seconds


@config
class FleetEventsConfig(KVEventsConfig):
    """vLLM's KV event settings for our publisher, and the key file if there is one. An engine
    process that unpickles it imports this module, which registers the publisher."""

    publisher: Literal["null", "zmq", "mmrouter"] = "mmrouter"
    key_file: str = ""


class FleetEventPublisher(ZmqEventPublisher):
    """vLLM's publisher with snapshots for late readers. Needs a replay endpoint."""

    def __init__(
        self, data_parallel_rank: int, *, key_file: str, buffer_steps: int, **settings: object
    ) -> None:
        """Read the key, if there is one. Raises ConfigurationError: it can't be read."""
        self._key = FleetKey.read(Path(key_file)) if key_file else None
        kept = max(buffer_steps, LEAST_KEPT)
        super().__init__(data_parallel_rank, buffer_steps=kept, **settings)

    def _socket_setup(self) -> None:
        # vLLM's own context is shared by sockets that must stay unencrypted.
        self._ctx: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Set before the bind: later changes miss the first connections. vLLM sets its own limit on
        # the live socket.
        self._ctx.setsockopt(zmq.SNDHWM, QUEUED)
        self._ctx.setsockopt(zmq.MAXMSGSIZE, LARGEST_REQUEST)
        self._gate = Gate(self._ctx, self._key)
        super()._socket_setup()

    def _publisher_thread(self) -> None:
        log = EventLog(self._buffer)
        assert self._replay is not None, "a worker's settings have an endpoint for replays"
        replays = Replays(self._replay, self._topic_bytes, log)
        while self._running or self._event_queue.qsize() > 0:
            try:
                if self._turn(log, _BUSY_S if replays.turn() else _IDLE_S):
                    return
            except Exception:  # logged with its trace, and counted; live events must go on
                TASK_FAILURES.labels("KV events publisher").inc()
                logger.exception("publishing KV events failed")
                time.sleep(_PAUSE_S)

    def _turn(self, log: EventLog, wait: float) -> bool:
        """Publish some batches, waiting ``wait`` seconds for the first; return whether to stop."""
        for _ in range(_LIVE_FIRST):
            try:
                batch = self._event_queue.get(timeout=wait)
            except Empty:
                return False
            if batch is None:  # the end
                return True
            self._publish(log, batch)
            wait = 0.0
        return False

    def _publish(self, log: EventLog, batch: KVEventBatch) -> None:
        number, published = next(self._seq_gen), None
        try:
            payload = _encode(batch)
            self._pub.send_multipart((self._topic_bytes, number.to_bytes(8, "big"), payload))
            self._buffer.append((number, payload))
            published = payload
        finally:
            log.published(number, published, batch)
            self._event_queue.task_done()

    def shutdown(self) -> None:
        super().shutdown()
        self._gate.close()
        self._ctx.destroy(linger=0)


EventPublisherFactory.register_publisher(_NAME, FleetEventPublisher)


def fleet_events(
    events: KVEventsConfig | None, key: FleetKey | None, key_file: Path | None
) -> KVEventsConfig | None:
    """Return KV event settings that this worker may use, with or without a key, and with a replay
    port. Raises ConfigurationError: an endpoint leaves this host and there is no key."""
    if events is None or not events.enable_kv_cache_events or events.publisher == "null":
        return events
    replay_endpoint = events.replay_endpoint or _ANY_PORT
    for endpoint in (events.endpoint, replay_endpoint):
        check_bind(_bound(endpoint), key)
    settings = dataclasses.asdict(events) | {
        "publisher": _NAME,
        "replay_endpoint": replay_endpoint,
        "key_file": "" if key_file is None else str(key_file.absolute()),
    }
    return FleetEventsConfig(**settings)


def _bound(endpoint: str) -> str:
    """Return the address that vLLM will bind: a free port means this node's own address."""
    if endpoint == _ANY_PORT:
        return f"tcp://{os.environ.get('VLLM_HOST_IP', '*')}:0"
    return endpoint
