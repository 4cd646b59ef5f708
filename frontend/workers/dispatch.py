"""A request in flight at a worker, and the backlog of bytes to send to it."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import zmq

from common.request_plane.loop_socket import Frame
from common.request_plane.protocol import Ack, Failed, Nack, Output
from common.transfer.base import MediaHandle, join_frames
from common.transfer.metadata import encode_metadata


class Backlog:
    """Bytes of media queued for one worker. ZeroMQ bounds messages, not their size.

    Small frames are not counted: the queue's length bounds them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sending: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._nbytes = 0

    @property
    def full(self) -> bool:
        """Whether too many bytes wait. An empty backlog takes any size."""
        while self._sending and self._sending[0][0].done:
            self._nbytes -= self._sending.popleft()[1]
        return self._nbytes >= self._max_bytes

    def track(self, frames: Sequence[Frame]) -> list[Frame | zmq.Frame]:
        """Return the frames to send instead, which count until the last large one has left."""
        tracked: list[Frame | zmq.Frame] = list(frames)
        large = [n for n, frame in enumerate(frames) if len(frame) > zmq.COPY_THRESHOLD]
        if large:
            frame = tracked[large[-1]] = zmq.Frame(frames[large[-1]], track=True, copy=False)
            assert isinstance(frame.tracker, zmq.MessageTracker)
            nbytes = sum(memoryview(frames[n]).nbytes for n in large)
            self._sending.append((frame.tracker, nbytes))
            self._nbytes += nbytes
        return tracked


Answer = Ack | Nack | Output | Failed

TakeOutput: TypeAlias = Callable[[Output], bool]
"""Returns whether it consumed an output; otherwise the task of the request gets it."""


class Dispatch:
    """A request in flight: its unread answers and leased memory."""

    def __init__(
        self,
        handles: Iterable[MediaHandle],
        take: TakeOutput | None = None,
        computed: Callable[[], None] = lambda: None,
    ) -> None:
        """Offer ``take`` each output that arrives while the task of the request waits; ``computed``
        is for the link, see there.
        """
        self._answers: deque[Answer | Exception] = deque()
        self._take = take
        self._reader: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()  # get_running_loop is a system call
        self.given_up = False
        self.computed = computed
        self.handles = list(handles)
        self.since = time.monotonic()

    @property
    def unread(self) -> int:
        return len(self._answers)

    @property
    def awaited(self) -> bool:
        return self._reader is not None and not self._reader.done()

    def put(self, answer: Answer | Exception) -> None:
        awaited = self.awaited
        if awaited and self._take is not None and type(answer) is Output:
            try:
                if self._take(answer):
                    return
            except Exception as error:  # noqa: BLE001  # raised again where the request waits
                self.given_up = True
                answer = error
        self._answers.append(answer)
        if awaited and self._reader is not None:
            self._reader.set_result(None)

    def left(self) -> None:
        """Drop unread answers: their reader is gone, and the worker's last answer may be far."""
        self._take = None
        self._answers.clear()

    async def next(self) -> Answer | Exception:
        """Wait for the next answer. For one reader: asyncio's queue is for many, and slower."""
        if self._answers:
            # A client that left thousands of answers unread and disconnects: draining them never
            # awaits anything, and other requests and the workers need turns meanwhile.
            await asyncio.sleep(0)
        while not self._answers:
            self._reader = self._loop.create_future()
            await self._reader
        return self._answers.popleft()

    def give_up(self, error: Exception) -> None:
        """End the request with an error and ignore further answers. Idempotent."""
        if not self.given_up:
            self.given_up = True
            self.put(error)

    def release(self) -> None:
        """Release the leased memory. Idempotent."""
        for handle in self.handles:
            handle.release()
        self.handles.clear()


def is_last(answer: Answer) -> bool:
    return isinstance(answer, Failed) or (isinstance(answer, Output) and answer.finished)


def ship(handles: Sequence[MediaHandle]) -> tuple[list[bytes], Sequence[Frame]]:
    metadata, frames = join_frames(handles)
    return [encode_metadata(each) for each in metadata], frames
