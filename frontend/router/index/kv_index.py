"""Index of KV blocks: which targets hold which block, and how far into a prompt.

A table maps each block hash to its chunk; each chunk keeps its holders as bit masks, so that one
walk over a prompt's chunks answers for all workers.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from common.identity import BlockHash, Target, WorkerId
from frontend.router.index.chunks import MAX_BLOCKS, Chunk, ChunkTable
from frontend.router.index.target_bits import TargetBits, bits

_SWEPT_PER_STORED = 2
"""Blocks of retired slots swept per block stored, so that sweeping outpaces storing."""


class _Slot:
    """Number of distinct blocks of a slot, and copies beyond the first of blocks held several
    times.
    """

    __slots__ = ("blocks", "chunks", "copies")

    def __init__(self) -> None:
        self.chunks: set[Chunk] = set()
        self.blocks = 0
        self.copies: dict[BlockHash, int] = {}


class KvIndex:
    """Index from blocks to targets.

    Copies of one block on one target, in several cache slots or on several media, are counted,
    since each gets its own remove event: the block is gone with the last.
    """

    def __init__(self, slots: TargetBits | None = None) -> None:
        self._slots = TargetBits() if slots is None else slots
        self._slots.add_user(self._retire)
        self._chunks = ChunkTable()
        self._held: dict[int, _Slot] = {}
        self._retired: deque[tuple[int, _Slot]] = deque()
        self._suspended: set[Target] = set()
        self._hidden: int | None = 0  # None after a change, until it is needed

    def store(
        self,
        target: Target,
        hashes: Sequence[BlockHash],
        group: int = 0,
        *,
        parent: BlockHash | None = None,
        chained: bool = True,
    ) -> None:
        """Note that a target holds blocks; count one more copy if it holds them already.

        Args:
            target: registered on first use.
            group: KV cache group. A block counts as held when all groups of the target that ever
                stored one hold it.
            parent: the block before the first, if known.
            chained: whether each block is the child of the one before, as in a prompt. Otherwise
                each takes more room, and matching goes block by block.
        """
        if target not in self._slots:
            self._slots.open(target)
        slot = self._slots.slot(target, group)
        if target in self._suspended:
            self._hidden = None
        self.store_slot(slot, hashes, parent=parent, chained=chained)

    def remove(self, target: Target, hashes: Iterable[BlockHash], group: int = 0) -> None:
        """Note that a target dropped one copy of each block. Unknown blocks are ignored."""
        slot = self._slots.find(target, group)
        if slot is not None:
            self.remove_slot(slot, hashes)

    def store_slot(
        self,
        slot: int,
        hashes: Sequence[BlockHash],
        *,
        parent: BlockHash | None = None,
        chained: bool = True,
    ) -> None:
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = _Slot()
        chunks = self._chunks
        blocks = hashes if isinstance(hashes, list) else list(hashes)
        position = 0
        while position < len(blocks):
            chunk = chunks.get(blocks[position])
            if chunk is None and chained:
                before = blocks[position - 1] if position else parent
                position += self._add_new(slot, held, blocks, position, before)
            elif chunk is None:
                position += self._add_new(slot, held, [blocks[position]], 0, None)
            else:
                position += self._add_known(slot, held, chunk, blocks, position)
        if self._retired:
            self.sweep(_SWEPT_PER_STORED * len(blocks))

    def remove_slot(
        self, slot: int, hashes: Iterable[BlockHash], *, all_copies: bool = False
    ) -> None:
        """Remove one copy of each block from a live slot, or all copies."""
        blocks = hashes if isinstance(hashes, list) else list(hashes)
        held = self._held.get(slot)
        if held is None:
            return
        copies = held.copies
        if copies and all_copies:
            for block in blocks:
                copies.pop(block, None)
        position = 0
        while position < len(blocks):
            block = blocks[position]
            if copies and block in copies:
                if copies[block] > 1:
                    copies[block] -= 1
                else:
                    del copies[block]
                position += 1
            else:
                position += self._remove_run(slot, held, blocks, position)

    def clear(self, target: Target) -> None:
        """Forget all blocks of a target in constant time; :meth:`sweep` frees the memory."""
        self._slots.renew(target)
        self._hidden = None

    def drop(self, worker_id: WorkerId) -> None:
        for target in self._slots.targets():
            if target.worker_id == worker_id:
                self._slots.close(target)
        self._suspended = {one for one in self._suspended if one.worker_id != worker_id}
        self._hidden = None

    def suspend(self, target: Target) -> None:
        """Match none of a target's blocks until :meth:`resume`, but keep them."""
        self._suspended.add(target)
        self._hidden = None

    def resume(self, target: Target) -> None:
        self._suspended.discard(target)
        self._hidden = None

    def match(
        self, hashes: Sequence[BlockHash], predicted: "KvIndex | None" = None
    ) -> dict[Target, int]:
        """Return how many leading blocks each target holds, without targets that lack the first.
        With a second index over the same slots, a block counts as held if either has it.
        """
        depths: dict[Target, int] = {}
        for depth, targets in self.match_groups(hashes, predicted):
            depths.update(dict.fromkeys(targets, depth))
        return depths

    def match_groups(
        self, hashes: Sequence[BlockHash], predicted: "KvIndex | None" = None
    ) -> list[tuple[int, tuple[Target, ...]]]:
        """Return :meth:`match` as pairs of a depth and the targets that reach just that far."""
        slots = self._slots
        alive = slots.live
        blocks = hashes if isinstance(hashes, list) else list(hashes)
        shown, grouped = ~self._hide(), slots.grouped
        known = _Walk(self._chunks, blocks)
        guessed = None if predicted is None else _Walk(predicted._chunks, blocks)
        groups: list[tuple[int, tuple[Target, ...]]] = []
        depth = 0
        while alive and depth < len(blocks):
            if known.end <= depth:
                known.step(depth)
            lost = alive & ~(known.mask & shown)
            end = known.end
            if lost and guessed is not None:
                if guessed.end <= depth:
                    guessed.step(depth)
                # Where the second index covers all remaining slots, it alone sets the end.
                end = min(end, guessed.end) if alive & ~guessed.mask else guessed.end
                lost &= ~guessed.mask
            if lost:
                pending = lost & grouped
                while pending:
                    # A target dies with the first of its groups.
                    siblings = slots.mask(slots.owner(next(bits(pending))))
                    lost |= alive & siblings
                    pending &= ~siblings
                if depth:
                    groups.append((depth, slots.owners(lost)))
                alive ^= lost
            depth = end
        if alive and depth:
            groups.append((depth, slots.owners(alive)))
        return groups

    def matches(self, target: Target) -> bool:
        return target in self._slots and target not in self._suspended

    def holdings(self, target: Target) -> int:
        slots = bits(self._slots.mask(target))
        return sum(self._held[slot].blocks for slot in slots if slot in self._held)

    def sweep(self, limit: int) -> bool:
        """Free about ``limit`` blocks of retired slots, well below 1 µs each. Return if any are
        left.
        """
        while self._retired and limit > 0:
            slot, held = self._retired[0]
            while held.chunks and limit > 0:
                chunk = held.chunks.pop()
                limit -= len(chunk.hashes)
                self._take_away(1 << slot, chunk, 0, len(chunk.hashes))
            if not held.chunks:
                self._retired.popleft()
                self._slots.swept(slot)
        return bool(self._retired)

    def _retire(self, slot: int) -> bool:
        held = self._held.pop(slot, None)
        if held is None or not held.chunks:
            return True
        self._retired.append((slot, held))
        return False

    def _add_new(
        self, slot: int, held: _Slot, blocks: list[BlockHash], first: int, before: BlockHash | None
    ) -> int:
        """Add blocks from ``first`` on that have no holder yet; return how many."""
        chunks = self._chunks
        fresh = blocks[first : first + MAX_BLOCKS]
        # Stop before the first block that is held already or repeated.
        del fresh[chunks.new(fresh) :]
        chunk = None if before is None else chunks.get(before)
        if (
            chunk is not None
            and chunk.hashes[-1] == before
            and len(chunk.hashes) + len(fresh) <= MAX_BLOCKS
        ):
            chunk.append(fresh, 1 << slot)
        else:
            chunk = Chunk(fresh, (len(fresh),), (1 << slot,))
        chunks.put(fresh, chunk)
        held.chunks.add(chunk)
        held.blocks += len(fresh)
        return len(fresh)

    def _add_known(
        self, slot: int, held: _Slot, chunk: Chunk, blocks: list[BlockHash], first: int
    ) -> int:
        """Add a slot to held blocks, as far as they are contiguous; return how many."""
        bit = 1 << slot
        start = chunk.find(blocks[first]) if chunk.hashes[0] != blocks[first] else 0
        length = chunk.run(start, blocks, first)
        if chunk.mask_at(start) & bit:
            for block in blocks[first : first + length]:
                held.copies[block] = held.copies.get(block, 0) + 1
        else:
            chunk.change(start, start + length, bit, held=True)
            held.chunks.add(chunk)
            held.blocks += length
        return length

    def _remove_run(self, slot: int, held: _Slot, blocks: list[BlockHash], first: int) -> int:
        """Remove the block at ``first`` and its contiguous successors; return how many."""
        bit = 1 << slot
        chunk = self._chunks.get(blocks[first])
        start = 0 if chunk is None else chunk.find(blocks[first])
        if chunk is None or not chunk.mask_at(start) & bit:
            return 1
        # Evictions come last block first.
        length = chunk.run_back(start, blocks, first)
        if length > 1:
            start -= length - 1
        else:
            length = chunk.run(start, blocks, first)
        if held.copies and not held.copies.keys().isdisjoint(blocks[first : first + length]):
            # Some blocks have copies left: remove this one only, which comes first in either
            # direction.
            start, length = chunk.find(blocks[first]), 1
        held.blocks -= length
        self._take_away(bit, chunk, start, start + length)
        if not any(mask & bit for mask in chunk.masks):
            held.chunks.discard(chunk)
        return length

    def _take_away(self, bit: int, chunk: Chunk, start: int, end: int) -> None:
        """Remove a slot from blocks of a chunk, then blocks without holders."""
        chunk.change(start, end, bit, held=False)
        if 0 not in chunk.masks:
            return
        self._chunks.remove(chunk.cut_end())
        if chunk.hashes and 0 in chunk.masks:
            self._divide(chunk)

    def _divide(self, chunk: Chunk) -> None:
        """Remove blocks without holders inside a chunk: later blocks get chunks of their own."""
        kept: list[tuple[int, int]] = []
        for low, high, mask in chunk.parts(0, len(chunk.hashes)):
            if not mask:
                self._chunks.remove(chunk.hashes[low:high])
            elif kept and kept[-1][1] == low:
                kept[-1] = (kept[-1][0], high)
            else:
                kept.append((low, high))
        for low, high in kept[1:]:
            piece = chunk.cut(low, high)
            self._chunks.put(piece.hashes, piece)
            for slot in piece.holders():
                self._holder(slot).chunks.add(piece)
        before = chunk.holders()
        first = chunk.cut(*kept[0])
        chunk.hashes, chunk.ends, chunk.masks = first.hashes, first.ends, first.masks
        for slot in before - chunk.holders():
            self._holder(slot).chunks.discard(chunk)

    def _holder(self, slot: int) -> _Slot:
        held = self._held.get(slot)
        if held is None:
            return next(held for retired, held in self._retired if retired == slot)
        return held

    def _hide(self) -> int:
        """Return the slots of suspended targets, cached: a worker's
        targets are suspended in a row.
        """
        if self._hidden is None:
            self._hidden = 0
            for target in self._suspended:
                self._hidden |= self._slots.mask(target)
        return self._hidden


class _Walk:
    """Iterator over a prompt's blocks, from one set of holders to the next.

    ``mask`` has the slots that hold the blocks from the last step's depth up to ``end``.
    """

    __slots__ = ("_blocks", "_chunk", "_chunks", "_position", "end", "mask")

    def __init__(self, chunks: ChunkTable, blocks: list[BlockHash]) -> None:
        self._chunks = chunks
        self._blocks = blocks
        self._chunk: Chunk | None = None
        self._position = 0
        self.mask = 0
        self.end = 0

    def step(self, depth: int) -> None:
        """Find the holders of the block at a depth, and of those after it."""
        block = self._blocks[depth]
        chunk = self._chunk
        position = self._position
        if (
            chunk is None
            or self.end != depth
            or position >= len(chunk.hashes)
            or chunk.hashes[position] != block
        ):
            chunk = self._chunk = self._chunks.get(block)
            if chunk is None:
                self.mask = 0
                self.end = depth + 1
                return
            position = 0 if chunk.hashes[0] == block else chunk.find(block)
        length = chunk.chained_run(position, self._blocks, depth)
        self.mask = chunk.mask_at(position)
        self.end = depth + length
        self._position = position + length
