"""The indexes of blocks, handed around as one, and how far a target's index can be trusted."""

from enum import StrEnum
from typing import NamedTuple

from common.identity import Target, WorkerId
from frontend.router.index.kv_index import KvIndex
from frontend.router.index.predictions import Predictions
from frontend.router.index.slots import SlotTable
from frontend.router.index.windows import WindowIndex


class Knowledge(StrEnum):
    """How far the index of a target can be trusted."""

    EXACT = "exact"
    """The index equals the worker's cache as of its last event."""
    DEGRADED = "degraded"
    """Every indexed block is there, but some the worker holds are unknown; or a
    replay is under way, and until it ends none of the target's blocks is used."""
    APPROXIMATE = "approximate"
    """No usable events: only predictions from what was routed there."""


class IndexState(NamedTuple):
    """State of one target's index.

    Attributes:
        knowledge: how far it can be trusted.
        reason: a sentence for operators; empty when exact.
    """

    knowledge: Knowledge
    reason: str = ""


EXACT = IndexState(Knowledge.EXACT)


def degraded(reason: str) -> IndexState:
    """A :attr:`Knowledge.DEGRADED` state."""
    return IndexState(Knowledge.DEGRADED, reason)


def approximate(reason: str) -> IndexState:
    """A :attr:`Knowledge.APPROXIMATE` state."""
    return IndexState(Knowledge.APPROXIMATE, reason)


class BlockIndexes(NamedTuple):
    """Blocks of all targets.

    Attributes:
        slots: numbering of targets, shared by the others.
        known: blocks that events announced.
        windows: those of groups in which a hit needs only the last few.
        predicted: blocks that should be there since a prompt was sent there.
    """

    slots: SlotTable
    known: KvIndex
    windows: WindowIndex
    predicted: Predictions

    @classmethod
    def empty(cls) -> "BlockIndexes":
        """Indexes over a numbering of their own."""
        slots = SlotTable()
        return cls(slots, KvIndex(slots), WindowIndex(), Predictions(slots))

    def holdings(self, target: Target) -> int:
        """Blocks of a target that events announced, summed over its cache groups."""
        return self.known.holdings(target) + self.windows.holdings(target)

    def clear(self, target: Target) -> None:
        """Forget the blocks of a target, predicted ones included."""
        self.known.clear(target)
        for windows in (self.windows, self.predicted.windows):
            windows.clear(target)

    def drop(self, worker_id: WorkerId) -> None:
        """Forget a worker with all its ranks."""
        self.known.drop(worker_id)
        for windows in (self.windows, self.predicted.windows):
            windows.drop(worker_id)
