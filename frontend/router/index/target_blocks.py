"""Applying one target's cache changes to the indexes.

The place where "a block counts as held" is decided: by group, by medium, by copies.
When to apply what is in ``event_stream.py``.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from common.identity import BlockHash, Target
from frontend.router.event_wire import (
    Change,
    Cleared,
    EventBatch,
    MalformedEventError,
    Need,
    Removed,
    Stored,
)
from frontend.router.index.indexes import BlockIndexes

_MOST_BLOCKS = 1 << 22
"""Blocks of a cache or tier whose size is unknown; a bound for hostile messages."""

SLICE_BLOCKS: Final = 16_384
"""Blocks that are applied at a time: milliseconds of the event loop. Four times a step of 64k
tokens, so that nothing of an honest worker waits, unless a step of its own is as large."""


_COST: Final = 16
"""Of an event, in blocks: what it takes to find where it belongs."""
_REMOVAL: Final = 4
"""Of a block that is removed, in blocks that are stored: those that stand alone take so much."""


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
        self._rest: deque[Iterator[Change]] = deque()
        self.unusable = ""
        """Why these events can't be used at all; empty if they can."""
        self.unmodelled = ""
        """Why hits may be shorter than indexed; empty if they are not."""

    def apply(self, batch: EventBatch) -> None:
        """Apply the changes of one batch in order, behind what is left of earlier ones.

        Of a large batch only the first blocks: :meth:`go_on` until it says that nothing is left.
        Until then the target is known to hold what it held a moment ago.
        """
        self._rest.append(_pieces(chain(batch.changes, batch.later)))
        self.go_on()

    def go_on(self) -> bool:
        """Apply some more of what is left; return whether anything still is."""
        blocks = 0
        while self._rest and blocks < SLICE_BLOCKS and not self.unusable:
            try:
                change = next(self._rest[0])
            except StopIteration:
                self._rest.popleft()
                continue
            except MalformedEventError as error:
                # What came before it in the message is applied: rather know nothing.
                self.unusable = f"one of its events can't be read: {error}"
                continue
            blocks += _COST + _cost(change)
            self._apply(change)
        if self.unusable:
            self._rest.clear()
        elif not self._rest and self._overfull():
            # The worker counts copies in a way that we don't: rather know nothing.
            self.unusable = "its events add up to more blocks than its cache has"
        return bool(self._rest)

    def clear(self) -> None:
        """Forget everything, predictions included, and what is left to apply."""
        self._rest.clear()
        self._clear()

    def _clear(self) -> None:
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
            self._clear()

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


def _cost(change: Change) -> int:
    """Return what a change takes to apply, in blocks that are stored."""
    if isinstance(change, Cleared):
        return 0
    return len(change.hashes) * (_REMOVAL if isinstance(change, Removed) else 1)


def _pieces(changes: Iterable[Change]) -> Iterator[Change]:
    """Yield changes that are small, and together the same."""
    for change in changes:
        if isinstance(change, Cleared) or _cost(change) <= SLICE_BLOCKS:
            yield change
            continue
        length = SLICE_BLOCKS // (_REMOVAL if isinstance(change, Removed) else 1)
        for start in range(0, len(change.hashes), length):
            piece = change._replace(hashes=change.hashes[start : start + length])
            if start and isinstance(piece, Stored):
                piece = piece._replace(parent=change.hashes[start - 1] if piece.chained else None)
            yield piece
