"""One request on its way to a worker: what was sent with it, and what came back."""

import asyncio
import time
from collections.abc import Iterable, Sequence

from common.errors import SlowClientError, WorkerLostError
from common.protocol import Ack, Failed, Nack, Output
from common.transfer.base import MediaHandle, join_frames
from common.transfer.metadata import encode_metadata
from common.wire import Frame

Answer = Ack | Nack | Output | Failed


class Dispatch:
    """One request on its way: the answers not yet read, the memory not yet back."""

    def __init__(self, handles: Iterable[MediaHandle]) -> None:
        self.answers: asyncio.Queue[Answer | WorkerLostError | SlowClientError] = asyncio.Queue()
        self.given_up = False
        self.handles = list(handles)
        self.since = time.monotonic()

    def give_up(self, error: WorkerLostError | SlowClientError) -> None:
        """Nothing more of its answers is wanted. The second and later calls do nothing."""
        if not self.given_up:
            self.given_up = True
            self.answers.put_nowait(error)

    def release(self) -> None:
        """Give the memory back. The second and later calls do nothing."""
        for handle in self.handles:
            handle.release()
        self.handles.clear()


def is_last(answer: Answer) -> bool:
    """Whether the worker has ended a request with it."""
    return isinstance(answer, Failed) or (isinstance(answer, Output) and answer.finished)


def ship(handles: Sequence[MediaHandle]) -> tuple[list[bytes], Sequence[Frame]]:
    """The metadata of items for their message, and the frames that go with it."""
    metadata, frames = join_frames(handles)
    return [encode_metadata(each) for each in metadata], frames
