"""A process in the place of one that processes media: does as its batches say, at once.

Without vLLM, which takes many seconds to import: of the package that has the messages, only these
are imported where nobody has imported it.
"""

import importlib.util
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PACKAGE = "frontend.processing"

if PACKAGE not in sys.modules and (spec := importlib.util.find_spec(PACKAGE)) is not None:
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)

from frontend.bounded.child_process import Ready  # noqa: E402
from frontend.processing.child_messages import (  # noqa: E402 # the package is there by now
    Answer,
    BatchFailed,
    Fault,
    Wants,
)


@dataclass(frozen=True)
class Told:
    """A batch.

    Attributes:
        pixels: asked for, one after the other.
        hangs: never answers.
        media: only how many there are is looked at.
        bulk: so that it takes long to write.
    """

    pixels: tuple[int, ...] = ()
    hangs: bool = False
    media: tuple[None, ...] = (None,)
    bulk: bytes = b""
    modality: str = "image"


def main(descriptor: int) -> None:
    """Serve the frontend at the other end of a socket pair."""
    connection: Connection[Any, Any] = Connection(descriptor)
    connection.recv()
    connection.send(Ready())
    while True:
        try:
            told: Told = connection.recv()
        except EOFError:
            return
        if told.hangs:
            time.sleep(100_000)
        granted = True
        for pixels in told.pixels:
            connection.send(Wants(pixels))
            granted = connection.recv() is Answer.GRANTED
            if not granted:
                break
        if granted:
            connection.send(BatchFailed(Fault.INVALID, "done as told"))
