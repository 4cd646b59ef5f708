"""The three places where knowledge of blocks is kept, handed around as one."""

from typing import NamedTuple

from common.identity import Target, WorkerId
from frontend.router.index.kv_index import KvIndex
from frontend.router.index.predictions import Predictions
from frontend.router.index.slots import SlotTable
from frontend.router.index.windows import WindowIndex


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
