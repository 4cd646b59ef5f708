"""Applying one target's cache changes to the indexes.

The place where "a block counts as held" is decided: by group, by medium, by copies.
When to apply what is in ``event_stream.py``.
"""

from collections.abc import Sequence

from common.identity import BlockHash, Target
from frontend.router.event_wire import Change, EventBatch, Need, Removed, Stored
from frontend.router.index.indexes import BlockIndexes

_MOST_BLOCKS = 1 << 22
"""Blocks of a cache or tier whose size is unknown; a bound for hostile messages."""


class TargetBlocks:
    """The blocks of one target, in indexes shared by all.

    Args:
        target: registered by the caller.
        block_size: tokens per hashed block, from the card.
        capacity_blocks: blocks of its cache, 0 if unknown.
        indexes: where blocks are kept.
    """

    def __init__(
        self,
        target: Target,
        block_size: int,
        capacity_blocks: int,
        indexes: BlockIndexes,
    ) -> None:
        self._target = target
        self._block_size = block_size
        self._capacity = capacity_blocks or _MOST_BLOCKS
        self._index = indexes.known
        self._windows = indexes.windows
        self._predictions = indexes.predicted
        self._indexes = indexes
        self._offloaded: set[tuple[int, BlockHash]] = set()
        self.unusable = ""
        """Why these events can't be used at all; empty if they can."""
        self.unmodelled = ""
        """Why hits may be shorter than indexed; empty if they are not."""

    def apply(self, batch: EventBatch) -> None:
        """Apply the changes of one batch in order."""
        for change in batch.changes:
            self._apply(change)
        if self._overfull():
            # The worker counts copies in a way that we don't: rather know nothing.
            self.unusable = "its events add up to more blocks than its cache has"

    def clear(self) -> None:
        """Forget everything, predictions included."""
        self._indexes.clear(self._target)
        self._offloaded.clear()

    def suspend(self) -> None:
        """Use none of the blocks until :meth:`resume`."""
        self._index.suspend(self._target)

    def resume(self) -> None:
        """Use the blocks again."""
        self._index.resume(self._target)

    def _apply(self, change: Change) -> None:
        if isinstance(change, Stored):
            self._store(change)
        elif isinstance(change, Removed):
            self._remove(change)
        else:
            self.clear()

    def _store(self, change: Stored) -> None:
        if change.need is Need.UNKNOWN:
            self.unmodelled = f"its cache has a group of kind {change.kind}, which is not modelled"
            return
        if change.block_size != self._block_size:
            if not change.offloaded:
                self.unusable = (
                    f"its events have blocks of {change.block_size} tokens, "
                    f"its card says {self._block_size}"
                )
            return
        hashes: Sequence[BlockHash] = change.hashes
        if change.offloaded:
            # Offloading tiers hold one copy of a block, and may announce it repeatedly.
            hashes = [one for one in hashes if (change.group, one) not in self._offloaded]
            self._offloaded.update((change.group, one) for one in hashes)
        if change.need is Need.EVERY:
            self._index.store(
                self._target,
                hashes,
                change.group,
                parent=change.parent,
                chained=change.chained,
            )
        else:
            needed = max(1, -(-(change.window - 1) // self._block_size))
            # States, whose window is one token, are of no drafting layers.
            peeks = change.window > 1
            self._windows.store(self._target, hashes, change.group, needed, peeks=peeks)

    def _remove(self, change: Removed) -> None:
        hashes: Sequence[BlockHash] = change.hashes
        if change.offloaded:
            hashes = [one for one in hashes if (change.group, one) in self._offloaded]
            self._offloaded.difference_update((change.group, one) for one in hashes)
        if self._windows.knows(self._target, change.group):
            self._windows.remove(self._target, hashes, change.group)
            self._predictions.windows.remove(self._target, hashes, change.group, all_copies=True)
            return
        self._index.remove(self._target, hashes, change.group)
        self._predictions.evicted(self._target, hashes)

    @property
    def held(self) -> int:
        """Blocks, summed over cache groups."""
        return self._indexes.holdings(self._target)

    def _overfull(self) -> bool:
        offloaded = len(self._offloaded)
        return self.held - offloaded > self._capacity or offloaded > _MOST_BLOCKS
