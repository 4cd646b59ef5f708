"""Allocator of an arena: placement, leases and eviction. Pure bookkeeping over numbers: it touches
no memory and takes no lock. The arena owns both, and tests can drive this with millions of steps.
"""

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.transfer.arena.layout import SEGMENT_ALIGNMENT, aligned


@dataclass(eq=False, slots=True)
class Block:
    """A range of the arena: one segment, or free space between segments.

    Attributes:
        offset: first byte, a multiple of :data:`SEGMENT_ALIGNMENT`.
        size: bytes, likewise.
        leases: while there are any, the segment can't be evicted.
        last_used: value of the table's clock when the last lease ended.
    """

    offset: int
    size: int
    free: bool = True
    leases: int = 0
    last_used: int = 0
    previous: "Block | None" = field(default=None, repr=False)
    following: "Block | None" = field(default=None, repr=False)


@dataclass(frozen=True)
class Placement:
    """The new segment's block, with one lease, and the offsets of evicted ones."""

    block: Block
    evicted: list[int]


class SegmentTable:
    """Divides ``capacity`` bytes, a multiple of :data:`SEGMENT_ALIGNMENT`, among segments.

    First fit among free space. If none fits, neighbouring unleased segments and free space are
    evicted as one range: the range whose most recently used segment is the oldest. So :meth:`place`
    succeeds whenever a large enough range has no leases, however fragmented it is.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._clock = 0
        self._first = Block(0, capacity)
        # Sorted by offset, for first fit.
        self._free = [self._first] if capacity else []
        # LRU order, the oldest first: a dict is an ordered set.
        self._idle: dict[Block, None] = {}
        self.leased_bytes = 0

    def __iter__(self) -> Iterator[Block]:
        """Iterate over all blocks by offset; they cover the arena without a gap."""
        block: Block | None = self._first if self.capacity else None
        while block is not None:
            yield block
            block = block.following

    @property
    def free_bytes(self) -> int:
        return sum(block.size for block in self._free)

    def place(self, length: int) -> Placement | None:
        """Allocate and lease a segment, evicting if necessary; None if leases leave no room."""
        size = aligned(length, SEGMENT_ALIGNMENT)
        for block in self._free:
            if block.size >= size:
                return Placement(self._take(block, size), [])
        window = self._around_oldest(size) or self._oldest_window(size)
        if window is None:
            return None
        evicted = []
        for block in window:
            if not block.free:
                evicted.append(block.offset)
                space = self._make_free(block)
        return Placement(self._take(space, size), evicted)

    def lease(self, block: Block) -> None:
        if block.leases == 0:
            del self._idle[block]
            self.leased_bytes += block.size
        block.leases += 1

    def release(self, block: Block) -> None:
        """End one lease. A segment without leases becomes the most recently used."""
        block.leases -= 1
        if block.leases == 0:
            self.leased_bytes -= block.size
            self._clock += 1
            block.last_used = self._clock
            self._idle[block] = None

    def discard(self, block: Block) -> None:
        """Free a segment whose only lease is the caller's: its writer failed."""
        self.release(block)
        self._make_free(block)

    def _take(self, block: Block, size: int) -> Block:
        """Turn the start of a free block into a segment."""
        index = self._index(block)
        if block.size == size:
            del self._free[index]
        else:
            rest = Block(block.offset + size, block.size - size)
            self._link(rest, block.following)
            self._link(block, rest)
            self._free[index] = rest
            block.size = size
        block.free = False
        block.leases = 1
        self.leased_bytes += size
        return block

    def _make_free(self, block: Block) -> Block:
        """Free an idle segment; return the free block, merged with its neighbours."""
        del self._idle[block]
        block.free = True
        bisect.insort(self._free, block, key=_offset)
        if block.following is not None and block.following.free:
            self._absorb(block, block.following)
        if block.previous is not None and block.previous.free:
            block = block.previous
            assert block.following is not None
            self._absorb(block, block.following)
        return block

    def _absorb(self, block: Block, following: Block) -> None:
        del self._free[self._index(following)]
        block.size += following.size
        self._link(block, following.following)

    def _index(self, free: Block) -> int:
        return bisect.bisect_left(self._free, free.offset, key=_offset)

    @staticmethod
    def _link(block: Block, following: Block | None) -> None:
        block.following = following
        if following is not None:
            following.previous = block

    def _around_oldest(self, size: int) -> list[Block] | None:
        """Return the oldest segment with its free neighbours, if large enough: the usual case with
        items of similar size, without a scan."""
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return None
        window = [
            block
            for block in (oldest.previous, oldest, oldest.following)
            if block is not None and (block is oldest or block.free)
        ]
        return window if sum(block.size for block in window) >= size else None

    def _oldest_window(self, size: int) -> list[Block] | None:
        """Return the least recently used of all long enough ranges."""
        best: list[Block] | None = None
        best_age = self._clock + 1
        window: deque[Block] = deque()
        # Ages that can still become the window's newest, in descending order.
        newest: deque[Block] = deque()
        total = 0
        for block in self:
            if block.leases:
                window.clear()
                newest.clear()
                total = 0
                continue
            window.append(block)
            total += block.size
            while newest and _age(newest[-1]) <= _age(block):
                newest.pop()
            newest.append(block)
            while total - window[0].size >= size:
                dropped = window.popleft()
                total -= dropped.size
                if newest[0] is dropped:
                    newest.popleft()
            if total >= size and _age(newest[0]) < best_age:
                best_age = _age(newest[0])
                best = list(window)
        return best


def _offset(block: Block) -> int:
    return block.offset


def _age(block: Block) -> int:
    return 0 if block.free else block.last_used
