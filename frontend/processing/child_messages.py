"""Messages between a frontend and its media processes.

They travel over a private socket pair, so they may be pickled. In turns:

    frontend                      process
    StartUp                    ->
                             <-   Ready
    Batch                    ->
                             <-   Wants, for each medium before it is decoded
    Answer                   ->
                             <-   Results | BatchFailed
    Offsets                    ->
                             <-   buffers of items without room, then Written
"""

from argparse import Namespace
from dataclasses import dataclass
from enum import Enum

from common.identity import MmHash
from common.observability.log_lines import LogSetup
from common.request_plane.card import WorkerCard
from common.transfer.arena import ArenaOffer
from frontend.media_limits import FetchPolicy


@dataclass(frozen=True)
class StartUp:
    """First message: the task of a process.

    Attributes:
        card: the fleet's contract.
        serve_args: vLLM's API server arguments.
        log: as the frontend logs; None for Python's default.
    """

    card: WorkerCard
    serve_args: Namespace
    policy: FetchPolicy
    arena: ArenaOffer | None
    log: LogSetup | None = None


@dataclass(frozen=True)
class Wants:
    """The process is about to decode a medium of so many pixels."""

    pixels: int


class Answer(Enum):
    """Reply to :class:`Wants`."""

    GRANTED = "there is room"
    DENIED = "there is none: the batch is over"


@dataclass(frozen=True)
class Result:
    """A processed item to write: an envelope of :mod:`common.transfer.codec`, and buffer sizes."""

    mm_hash: MmHash
    envelope: bytes
    buffer_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Results:
    """A batch is processed.

    Attributes:
        items: one for each medium, in order.
        prompt_updates: vLLM's, for each item; pickled by cloudpickle, since they may hold functions
            that vLLM defines on the way.
        hf_runs: runs of the HF processor.
    """

    items: list[Result]
    prompt_updates: bytes
    hf_runs: int


class NoRoom(Enum):
    """Why an item has no place in the arena."""

    HELD = "the frontend has it already"
    SEND = "send its buffers instead"


@dataclass(frozen=True)
class Offsets:
    """Offsets of the items in the arena, in the order of the results."""

    offsets: list[int | NoRoom]


@dataclass(frozen=True)
class Written:
    """All items with a place in the arena are in it."""


class Fault(Enum):
    """Kind of a batch's failure."""

    REFUSED = "a limit or the decoder refuses a medium"
    INVALID = "vLLM refuses a medium"
    BROKEN = "an error of ours or of vLLM's"
    MISSING = "a Python package is not installed"
    MEMORY = "a medium takes more memory than it may"
    FILES = "no file can be opened"


@dataclass(frozen=True)
class BatchFailed:
    """A batch failed; the process continues. ``reason`` is for the user: the missing package, or
    the medium that takes too much memory.
    """

    fault: Fault
    reason: str
