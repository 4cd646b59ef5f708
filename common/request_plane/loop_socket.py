"""ZMQ sockets that an event loop reads in the turn in which a message arrives.

pyzmq's asyncio socket takes three turns of the loop, a future and a dozen calls per message. With
many engines, each step a message, that was a fifth of a frontend's time.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import zmq
import zmq.asyncio

from common.aio.cleanup import undo_on_error
from common.errors import ProtocolError

Frame: TypeAlias = bytes | bytearray | memoryview

MAX_FRAMES: Final = 1 << 14
"""Of one message: inline media of 5,000 pictures, or the outputs of one step. ZeroMQ limits the
size of a frame and no number of them; each takes 10 µs of the event loop."""

MAX_FRAME_BYTES: Final = 1 << 20
"""Limit of a frame; ``wire.split`` cuts larger ones. ZeroMQ allocates a frame before its peer has
authenticated: a stranger filled 4 GiB of a worker over each connection."""

FRAME_LIMIT: Final = MAX_FRAME_BYTES + 64
"""ZeroMQ's limit of a frame, to which CURVE adds 33 bytes."""

_DROPPED_AT_ONCE: Final = 1000


class LoopReader:
    """Receives messages of a socket, for one task at a time."""

    def __init__(self, plain: zmq.Socket[bytes]) -> None:
        self._plain = plain
        self._fd = int(plain.getsockopt(zmq.FD))
        self._watching: asyncio.AbstractEventLoop | None = None
        self._reader: asyncio.Future[None] | None = None
        self._stopped = False

    def look(self) -> bool:
        """Return whether a message is pending, and wake its receiver. Also called after each send,
        in which ZMQ may notice a message that its file handle no longer signals."""
        there = bool(int(self._plain.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if there and self._reader is not None:
            self._wake()
        return there

    @property
    def waited_for(self) -> bool:
        return self._reader is not None

    @property
    def does_not_wait(self) -> bool:
        """Whether :meth:`receive` would return at once."""
        return not self._stopped and self.look()

    async def receive(self) -> list[zmq.Frame]:
        """Return the next message's frames, at once if one is pending: a busy caller should yield.
        Raises zmq.ZMQError: stopped. Raises ProtocolError: more than :data:`MAX_FRAMES`; dropped.
        """
        if self._stopped:
            # A shadow's pointer may be another socket's by now: ZMQ has freed the first.
            raise zmq.ZMQError(zmq.ENOTSOCK)
        if not self.look():
            await self._wait()
        while True:
            try:
                frames = [self._plain.recv(zmq.NOBLOCK, copy=False)]
            except zmq.Again:  # ZMQ had news of another kind
                await self._wait()
                continue
            while frames[-1].more and len(frames) < MAX_FRAMES:
                frames.append(self._plain.recv(zmq.NOBLOCK, copy=False))
            if frames[-1].more:
                await self._drop()
                raise ProtocolError(f"a message has more than {MAX_FRAMES} frames")
            return frames

    async def _drop(self) -> None:
        """Drop the rest of a message, which is complete in ZeroMQ, yielding to other tasks."""
        for count in itertools.count(1):
            if not self._plain.recv(zmq.NOBLOCK, copy=False).more:
                return
            if count % _DROPPED_AT_ONCE == 0:
                await asyncio.sleep(0)
                if self._stopped:
                    raise asyncio.CancelledError

    def stop(self) -> None:
        """Stop receiving and cancel a waiter, even a woken one, unless its loop is closed."""
        self._stopped = True
        self._unwatch()
        if self._reader is not None and not self._reader.get_loop().is_closed():
            self._reader.cancel()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        if self._watching is not loop:
            self._unwatch()
            loop.add_reader(self._fd, self._wake)
            self._watching = loop
        own = self._reader = loop.create_future()
        try:
            await own
        finally:
            if self._reader is own:  # a cancelled receiver may come here after the next one began
                self._reader = None
        if self._stopped:  # after it was woken, and before its turn
            raise asyncio.CancelledError

    def _wake(self) -> None:
        if self._reader is None:
            self._unwatch()  # until a receiver waits: the loop would call again in every turn
        elif not self._reader.done():
            self._reader.set_result(None)

    def _unwatch(self) -> None:
        if self._watching is not None and not self._watching.is_closed():
            self._watching.remove_reader(self._fd)
        self._watching = None


class LoopSocket:
    """Receives like :class:`LoopReader`, and sends without waiting. Bind or connect ``plain``;
    ``monitor`` reports its connections."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        kind: int,
        options: Mapping[zmq.SocketOption, int],
        monitored: int,
    ) -> None:
        """Monitor the given events. Raises zmq.ZMQError: no file handle is left."""
        # Created by the context, which applies the fleet's key.
        made: Any = context.socket(kind, socket_class=cast(Any, zmq.Socket))
        self.plain: Final[zmq.Socket[bytes]] = made
        with undo_on_error(self.plain.close):
            self.plain.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
            for option, value in options.items():
                self.plain.setsockopt(option, value)
            self._reader = LoopReader(self.plain)
            # Its messages are rare, so pyzmq's own class is fast enough.
            self.monitor: Any = self.plain.get_monitor_socket(monitored)

    @property
    def closed(self) -> bool:
        return bool(self.plain.closed)

    @property
    def readable(self) -> bool:
        """Whether a message is pending."""
        return self._reader.look()

    async def receive(self) -> list[zmq.Frame]:
        """See :meth:`LoopReader.receive`."""
        return await self._reader.receive()

    def send(self, frames: Sequence[Frame | zmq.Frame], *, copy: bool = False) -> None:
        """Send or raise zmq.Again. For small frames a copy costs less than tracking zero-copy."""
        try:
            self.plain.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        finally:
            if self._reader.waited_for:
                self._reader.look()

    def close(self, linger_ms: int) -> None:
        """Close within ``linger_ms``, sending queued messages. Later calls do nothing."""
        self._reader.stop()
        if self.plain.closed:
            return
        self.plain.disable_monitor()
        self.monitor.close(linger=0)
        self.plain.close(linger=linger_ms)
