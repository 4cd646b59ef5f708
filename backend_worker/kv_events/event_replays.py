"""Answering readers that ask for KV events: some at a time, so that live events don't wait.

The protocol is that of vLLM's publisher: ``["", number]`` is asked on a ROUTER socket, and
``["", topic, number, payload]`` comes per batch, then a number of -1.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from backend_worker.kv_events.event_log import EventLog, Message

logger = logging.getLogger(__name__)

QUEUED: Final = 64
"""Messages that ZMQ queues for one reader; the others wait until it has read."""

LARGEST_REQUEST: Final = 1024
"""Bytes."""

_AT_ONCE: Final = 64
"""Readers that are answered at once; the others wait in the socket."""

_TURN_S: Final = 0.001
"""How long a turn may take, in seconds, but for its last message."""

_STUCK_S: Final = 30.0
"""How long a reader may take nothing before it is given up, in seconds."""

_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


@dataclass(slots=True)
class _Reader:
    """Somebody who has asked.

    Attributes:
        start: from which number on.
        left: messages still to send, the end excluded; None before there is an answer.
        moved: when it last took one, in monotonic seconds.
    """

    start: int
    left: deque[Message] | None
    moved: float


class Replays:
    """The readers of one rank. For one thread.

    Args:
        socket: a ROUTER, bound; told by this to say when a reader has no room or is gone.
        topic: of the rank's messages.
        log: what they are answered from.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        topic: bytes,
        log: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket = socket
        self._topic = topic
        self._log = log
        self._clock = clock
        self._readers: dict[bytes, _Reader] = {}

    def turn(self) -> bool:
        """Take questions and send what there is time for.

        Returns:
            Whether readers wait for more.
        """
        ends = self._clock() + _TURN_S
        self._take_questions()
        while self._log.work() and self._clock() < ends:
            pass
        for name in list(self._readers):
            self._serve(name, ends)
            if self._clock() > ends:
                break
        return bool(self._readers)

    def _take_questions(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._readers) >= _AT_ONCE or not self._socket.poll(0):
                return
            frames = self._socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
                logger.warning("a request for a replay has %d frames", len(frames))
                continue
            start = int.from_bytes(frames[2], "big")
            # Who asks again wants another answer than before.
            self._readers.pop(frames[0], None)
            self._readers[frames[0]] = _Reader(start, None, self._clock())

    def _serve(self, name: bytes, ends: float) -> None:
        """Send to one reader, and put it behind the others."""
        reader = self._readers.pop(name)
        try:
            done = self._send(name, reader, ends)
        except zmq.Again:
            done = self._clock() - reader.moved > _STUCK_S
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            done = True
        if not done:
            self._readers[name] = reader

    def _send(self, name: bytes, reader: _Reader, ends: float) -> bool:
        """Send until the time is over; whether the reader has all."""
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
            reader.moved = self._clock()
            if reader.moved > ends:
                return False
        self._socket.send_multipart((name, b"", b"", _END, b""), zmq.DONTWAIT)
        return True
