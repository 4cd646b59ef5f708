"""All block indexes of a router, and how events change them.

This module decides when a block counts as held: by group, by medium, by copies. ``event_stream.py``
decides when to apply events.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import chain
from typing import Final, NamedTuple

from common.identity import BlockHash, Target, WorkerId
from frontend.router.event_wire import (
    Change,
    Cleared,
    EventBatch,
    MalformedEventError,
    Need,
    Removed,
    Stored,
)
from frontend.router.index.kv_index import KvIndex
from frontend.router.index.predictions import Predictions
from frontend.router.index.target_bits import TargetBits
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
    """State of one target's index, and a sentence for operators, empty when exact."""

    knowledge: Knowledge
    reason: str = ""


EXACT = IndexState(Knowledge.EXACT)


def degraded(reason: str) -> IndexState:
    return IndexState(Knowledge.DEGRADED, reason)


def approximate(reason: str) -> IndexState:
    return IndexState(Knowledge.APPROXIMATE, reason)


class BlockIndexes(NamedTuple):
    """Blocks of all targets: announced, announced in windowed groups, and predicted ones."""

    slots: TargetBits
    known: KvIndex
    windows: WindowIndex
    predicted: Predictions

    @classmethod
    def empty(cls) -> "BlockIndexes":
        slots = TargetBits()
        return cls(slots, KvIndex(slots), WindowIndex(), Predictions(slots))

    def holdings(self, target: Target) -> int:
        """Return the number of announced blocks of a target, summed over its cache groups."""
        return self.known.holdings(target) + self.windows.holdings(target)

    def clear(self, target: Target) -> None:
        """Forget the blocks of a target, predicted ones included."""
        self.known.clear(target)
        for windows in (self.windows, self.predicted.windows):
            windows.clear(target)

    def drop(self, worker_id: WorkerId) -> None:
        self.known.drop(worker_id)
        for windows in (self.windows, self.predicted.windows):
            windows.drop(worker_id)


_MAX_BLOCKS = 1 << 22
"""Blocks of a cache or tier, whatever size its worker's card names: 64 million tokens. Each takes
some 200 bytes of a frontend."""

SLICE_BLOCKS: Final = 16_384
"""Blocks applied at a time: milliseconds of the event loop. Four times a step of 64k tokens, so
that no event of an honest worker waits, unless a step of its own is as large."""

_COST: Final = 16
"""Cost of an event, in blocks: finding its place."""
_REMOVAL: Final = 4
"""Cost of removing a block, in stored blocks, when it stands alone."""


class TargetBlocks:
    """Blocks of one target, which the caller registered, in indexes shared by all.

    A capacity of 0 means unknown. ``unusable`` is why its events can't be used, ``unmodelled`` why
    hits may be shorter than indexed; both are empty otherwise.
    """

    def __init__(
        self, target: Target, block_size: int, capacity_blocks: int, indexes: BlockIndexes
    ) -> None:
        self._target = target
        self._block_size = block_size
        self._capacity = min(capacity_blocks or _MAX_BLOCKS, _MAX_BLOCKS)
        self._index = indexes.known
        self._windows = indexes.windows
        self._predictions = indexes.predicted
        self._indexes = indexes
        self._offloaded: set[tuple[int, BlockHash]] = set()
        self._rest: deque[Iterator[Change]] = deque()
        self.unusable = ""
        self.unmodelled = ""

    def apply(self, batch: EventBatch) -> None:
        """Apply the changes of one batch in order, after pending ones.

        Applies only the first blocks of a large batch: call :meth:`go_on` until it returns False.
        Until then the index shows a slightly older state.
        """
        self._rest.append(_pieces(chain(batch.changes, batch.later)))
        self.go_on()

    def go_on(self) -> bool:
        blocks = 0
        while self._rest and blocks < SLICE_BLOCKS and not self.unusable:
            try:
                change = next(self._rest[0])
            except StopIteration:
                self._rest.popleft()
                continue
            except MalformedEventError as error:
                # Earlier changes of the message are applied: rather know nothing.
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
        """Forget everything, predictions and pending changes included."""
        self._rest.clear()
        self._clear()

    def _clear(self) -> None:
        self._indexes.clear(self._target)
        self._offloaded.clear()

    def suspend(self) -> None:
        self._index.suspend(self._target)

    def resume(self) -> None:
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
                self._target, hashes, change.group, parent=change.parent, chained=change.chained
            )
        else:
            needed = max(1, -(-(change.window - 1) // self._block_size))
            # Recurrent states, whose window is one token, belong to no drafting layers.
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
        return self._indexes.holdings(self._target)

    def _overfull(self) -> bool:
        offloaded = len(self._offloaded)
        return self.held - offloaded > self._capacity or offloaded > _MAX_BLOCKS


def _cost(change: Change) -> int:
    """Return the cost of applying a change, in stored blocks."""
    if isinstance(change, Cleared):
        return 0
    return len(change.hashes) * (_REMOVAL if isinstance(change, Removed) else 1)


def _pieces(changes: Iterable[Change]) -> Iterator[Change]:
    """Split large changes into small ones of the same effect."""
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
