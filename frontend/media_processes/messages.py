"""What a frontend and the processes that it starts for processing say to each other.

Over a socket pair that nobody else has, so these may be pickled. In turns:

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
from typing import Final

from common.identity import MmHash
from common.observability.log_lines import LogSetup
from common.request_plane.card import WorkerCard
from common.transfer.arena import ArenaOffer
from frontend.media_limits import FetchPolicy

FORK: Final = b"fork"
"""What a fork server is told, with the file descriptor that the child gets. It answers with the
child's pid, and its pidfd."""


@dataclass(frozen=True)
class StartUp:
    """What a process is to do: the first message.

    Attributes:
        card: the fleet's contract.
        serve_args: vLLM's API server arguments.
        policy: limits on decoding.
        arena: where to write tensors; None if there is none.
        log: as the frontend logs; None to log as Python does by itself.
    """

    card: WorkerCard
    serve_args: Namespace
    policy: FetchPolicy
    arena: ArenaOffer | None
    log: LogSetup | None = None


@dataclass(frozen=True)
class Ready:
    """The process can process."""


@dataclass(frozen=True)
class Wants:
    """The process is about to decode a medium.

    Attributes:
        pixels: that it will take.
    """

    pixels: int


class Answer(Enum):
    """Whether it may."""

    GRANTED = "there is room"
    DENIED = "there is none: the batch is over"


@dataclass(frozen=True)
class Result:
    """One processed item, ready to be written.

    Attributes:
        envelope: see :mod:`common.transfer.codec`.
        buffer_sizes: bytes of each of its buffers.
    """

    mm_hash: MmHash
    envelope: bytes
    buffer_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Results:
    """A batch is processed.

    Attributes:
        items: one for each medium, in order.
        prompt_updates: vLLM's, for each item; pickled by cloudpickle, since they may hold
            functions that vLLM defines on the way.
        hf_runs: how often the HF processor ran for it.
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
    """Where to write the items: offsets in the arena, in the order of the results."""

    offsets: list[int | NoRoom]


@dataclass(frozen=True)
class Written:
    """All items with a place in the arena are in it."""


class Fault(Enum):
    """What is wrong with a batch."""

    REFUSED = "a limit or the decoder refuses a medium"
    INVALID = "vLLM refuses a medium"
    BROKEN = "an error of ours or of vLLM's"
    MISSING = "a Python package is not installed"
    MEMORY = "a medium takes more memory than it may"


@dataclass(frozen=True)
class BatchFailed:
    """A batch could not be processed; the process goes on.

    Attributes:
        reason: for the user; the package if one is missing, what the medium is if it takes too
            much memory.
    """

    fault: Fault
    reason: str
