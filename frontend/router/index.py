"""The index of KV blocks: which targets hold which block, and how far into a prompt.

A dictionary from block hash to the set of targets as a bit mask, so one walk over a
prompt's hashes answers for all workers. How blocks get in is ``events.py`` and
``approximate.py``.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from common.identity import BlockHash, Target, WorkerId
from frontend.router.slots import SlotTable, bits

_INTERNED_LIMIT = 1 << 16
"""Distinct sets of targets kept for sharing; beyond it sharing starts anew."""

_SWEPT_PER_STORED = 2
"""Blocks of retired slots swept per block stored, so that sweeping always wins."""


class IndexStatistics(NamedTuple):
    """State of an index.

    Attributes:
        blocks: distinct block hashes held by anyone.
        holdings: pairs of slot and block, each duplicate counted once.
        unswept: holdings of slots already retired, which no match counts any more.
        targets: registered targets.
        mask_bits: width of the bit masks.
        unknown_removals: removed blocks that were not held, since start.
    """

    blocks: int
    holdings: int
    unswept: int
    targets: int
    mask_bits: int
    unknown_removals: int


class KvIndex:
    """Which targets hold which blocks.

    Copies of one block on one target, in several cache slots or on several media, are
    counted, since each gets its own remove event: the block is gone with the last.

    Args:
        slots: numbering of targets, shared by indexes that are matched together.
    """

    def __init__(self, slots: SlotTable | None = None) -> None:
        self._slots = SlotTable() if slots is None else slots
        self._slots.add_user(self)
        self._masks: dict[BlockHash, int] = {}
        self._held: dict[int, dict[BlockHash, int]] = {}
        self._retired: deque[tuple[int, dict[BlockHash, int]]] = deque()
        self._interned: dict[int, int] = {}
        self._suspended: set[Target] = set()
        self._hidden = 0
        self._unknown_removals = 0

    def store(self, target: Target, hashes: Iterable[BlockHash], group: int = 0) -> None:
        """Note that a target holds blocks; once more, if it holds them already.

        Args:
            target: registered on first use.
            hashes: blocks, in any order.
            group: KV cache group. A block counts as held when all groups of the target
                that ever stored one hold it.
        """
        if target not in self._slots:
            self._slots.open(target)
        slot = self._slots.slot(target, group)
        if target in self._suspended:
            self._hide()
        self.store_slot(slot, hashes)

    def remove(self, target: Target, hashes: Iterable[BlockHash], group: int = 0) -> None:
        """Note that a target dropped one copy of each block. Unknown blocks are counted."""
        slot = self._slots.find(target, group)
        if slot is not None:
            self.remove_slot(slot, hashes)

    def store_slot(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        """:meth:`store` for a live slot."""
        held = self._held.setdefault(slot, {})
        masks = self._masks
        bit = 1 << slot
        alone = self._interned.setdefault(bit, bit)
        stored = 0
        for block in hashes:
            stored += 1
            copies = held.get(block)
            if copies is not None:
                held[block] = copies + 1
                continue
            held[block] = 1
            mask = masks.get(block)
            masks[block] = alone if mask is None else self._intern(mask | bit)
        if self._retired:
            self.sweep(_SWEPT_PER_STORED * stored)

    def remove_slot(
        self, slot: int, hashes: Iterable[BlockHash], *, all_copies: bool = False
    ) -> None:
        """:meth:`remove` for a live slot, on request of all copies at once."""
        held = self._held.get(slot, {})
        masks = self._masks
        bit = 1 << slot
        for block in hashes:
            copies = held.get(block)
            if copies is None:
                self._unknown_removals += 1
            elif copies > 1 and not all_copies:
                held[block] = copies - 1
            else:
                del held[block]
                rest = masks[block] & ~bit
                if rest:
                    masks[block] = self._intern(rest)
                else:
                    del masks[block]

    def clear(self, target: Target) -> None:
        """Forget all blocks of a target. Takes no time; see :meth:`sweep`."""
        self._slots.renew(target)
        self._hide()

    def drop(self, worker_id: WorkerId) -> None:
        """Forget a worker with all its ranks. Takes no time; see :meth:`sweep`."""
        for target in self._slots.targets():
            if target.worker_id == worker_id:
                self._slots.close(target)
        self._suspended = {one for one in self._suspended if one.worker_id != worker_id}
        self._hide()

    def suspend(self, target: Target) -> None:
        """Match none of a target's blocks until :meth:`resume`, but keep them."""
        self._suspended.add(target)
        self._hide()

    def resume(self, target: Target) -> None:
        """Match a target's blocks again."""
        self._suspended.discard(target)
        self._hide()

    def match(
        self, hashes: Sequence[BlockHash], predicted: "KvIndex | None" = None
    ) -> dict[Target, int]:
        """For every target that holds the first block, how many leading ones it holds.

        Args:
            hashes: a prompt's blocks, first to last.
            predicted: a second index over the same slots; a block counts as held if
                either has it.
        """
        slots = self._slots
        alive = slots.live
        if not alive or not hashes:
            return {}
        shown = ~self._hidden
        grouped = slots.grouped
        depths: dict[Target, int] = {}
        depth = 0
        known = map(self._masks.get, hashes, repeat(0))
        # Neighbouring blocks are mostly held by the same targets and share one mask
        # object, so the usual step is one look-up and one comparison of identities.
        last_known: int | None = None
        last_guessed: int | None = None
        guesses = map(predicted._masks.get, hashes, repeat(0)) if predicted else repeat(0)
        for mask, guess in zip(known, guesses, strict=False):
            if mask is not last_known or guess is not last_guessed:
                last_known, last_guessed = mask, guess
                survivors = alive & ((mask & shown) | guess)
                lost = alive ^ survivors
                if lost:
                    if lost & grouped:
                        # A target dies with the first of its groups.
                        for slot in bits(lost & grouped):
                            survivors &= ~slots.mask(slots.owner(slot))
                    if depth:
                        for slot in bits(alive ^ survivors):
                            depths[slots.owner(slot)] = depth
                    if not survivors:
                        return depths
                    alive = survivors
            depth += 1
        for slot in bits(alive):
            depths[slots.owner(slot)] = depth
        return depths

    def matches(self, target: Target) -> bool:
        """Whether a target is registered and not suspended."""
        return target in self._slots and target not in self._suspended

    def holdings(self, target: Target) -> int:
        """Blocks a target holds, summed over its groups, each duplicate counted once."""
        return sum(len(self._held.get(slot, ())) for slot in bits(self._slots.mask(target)))

    def sweep(self, limit: int) -> bool:
        """Free the memory of up to ``limit`` blocks of retired slots.

        Returns:
            Whether some are left. About 0.3 µs a block.
        """
        masks = self._masks
        while self._retired and limit > 0:
            slot, held = self._retired[0]
            keep = ~(1 << slot)
            while held and limit > 0:
                block, _ = held.popitem()
                limit -= 1
                rest = masks[block] & keep
                if rest:
                    masks[block] = self._intern(rest)
                else:
                    del masks[block]
            if not held:
                self._retired.popleft()
                self._slots.swept(slot)
        return bool(self._retired)

    def retire(self, slot: int) -> bool:
        """See :class:`~frontend.router.slots.SlotUser`."""
        held = self._held.pop(slot, None)
        if not held:
            return True
        self._retired.append((slot, held))
        return False

    def statistics(self) -> IndexStatistics:
        """Counts, in time proportional to the number of slots."""
        return IndexStatistics(
            blocks=len(self._masks),
            holdings=sum(map(len, self._held.values())),
            unswept=sum(len(held) for _, held in self._retired),
            targets=len(self._slots.targets()),
            mask_bits=len(self._slots),
            unknown_removals=self._unknown_removals,
        )

    def _intern(self, mask: int) -> int:
        """The one object for this set of targets, which saves memory and speeds matching."""
        if len(self._interned) >= _INTERNED_LIMIT:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)

    def _hide(self) -> None:
        hidden = 0
        for target in self._suspended:
            hidden |= self._slots.mask(target)
        self._hidden = hidden
