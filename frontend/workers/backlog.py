"""How many bytes wait to be sent to one worker. ZeroMQ bounds messages, not their size."""

from collections import deque
from collections.abc import Sequence

import zmq

from common.request_plane.wire import Frame


class Backlog:
    """Media on their way to a worker's host, bounded.

    Small frames are not counted: the queue's length bounds them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sending: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._nbytes = 0

    @property
    def full(self) -> bool:
        """Whether more bytes wait than should. Anything goes if nothing waits."""
        while self._sending and self._sending[0][0].done:
            self._nbytes -= self._sending.popleft()[1]
        return self._nbytes >= self._max_bytes

    def track(self, frames: Sequence[Frame]) -> list[Frame | zmq.Frame]:
        """The frames to send instead, which count until the last large one has left."""
        tracked: list[Frame | zmq.Frame] = list(frames)
        large = [n for n, frame in enumerate(frames) if len(frame) > zmq.COPY_THRESHOLD]
        if large:
            frame = tracked[large[-1]] = zmq.Frame(frames[large[-1]], track=True, copy=False)
            assert isinstance(frame.tracker, zmq.MessageTracker)
            nbytes = sum(memoryview(frames[n]).nbytes for n in large)
            self._sending.append((frame.tracker, nbytes))
            self._nbytes += nbytes
        return tracked
