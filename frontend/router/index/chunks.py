"""Chunks: runs of neighbouring blocks with their holders, and a table from block to chunk.

The unit of ``kv_index.py``: prompts are matched run by run instead of block by block.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from common.identity import BlockHash
from frontend.router.index.target_bits import bits

MAX_BLOCKS = 256
"""Blocks in one chunk. The time to find a block inside a chunk is proportional."""


class Chunk:
    """Blocks, each a child of the one before as far as its worker said, divided into segments.

    All blocks of a segment are held by the same slots (bit masks); neighbouring segments differ,
    and every block has a holder. A prefix shared by any number of workers is one chunk with one
    segment. ``ends`` has the index after the last block of each segment.
    """

    __slots__ = ("ends", "hashes", "masks")

    def __init__(
        self, hashes: list[BlockHash], ends: tuple[int, ...], masks: tuple[int, ...]
    ) -> None:
        self.hashes = hashes
        self.ends = ends
        self.masks = masks

    def find(self, block: BlockHash) -> int:
        # Look first where lookups usually hit: evictions begin at the end.
        if self.hashes[-1] == block:
            return len(self.hashes) - 1
        return self.hashes.index(block)

    def mask_at(self, position: int) -> int:
        return self.masks[bisect_right(self.ends, position)]

    def run(self, start: int, blocks: list[BlockHash], first: int) -> int:
        """Return how many blocks from ``start`` on equal ``blocks`` from ``first`` on, at most to
        the end of the segment, so that all have the same holders.
        """
        end = self.ends[bisect_right(self.ends, start)]
        length = min(end - start, len(blocks) - first)
        return _common(self.hashes[start : start + length], blocks[first : first + length])

    def chained_run(self, start: int, blocks: list[BlockHash], first: int) -> int:
        """Return the same as :meth:`run` for blocks of a prompt, by binary search.

        A block's hash covers all blocks before it, so equality at one place implies equality at all
        earlier places, back to where chunk and prompt meet.
        """
        end = self.ends[bisect_right(self.ends, start)]
        length = min(end - start, len(blocks) - first)
        hashes = self.hashes
        if hashes[start + length - 1] == blocks[first + length - 1]:
            return length
        low, high = 0, length - 1
        while low < high:
            middle = (low + high) // 2
            if hashes[start + middle] == blocks[first + middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def run_back(self, start: int, blocks: list[BlockHash], first: int) -> int:
        """Return the same as :meth:`run`, backwards to the beginning of the segment."""
        segment = bisect_right(self.ends, start)
        begin = self.ends[segment - 1] if segment else 0
        length = min(start + 1 - begin, len(blocks) - first)
        back = self.hashes[start + 1 - length : start + 1]
        back.reverse()
        return _common(back, blocks[first : first + length])

    def append(self, blocks: list[BlockHash], mask: int) -> None:
        self.hashes += blocks
        if self.masks[-1] == mask:
            self.ends = (*self.ends[:-1], len(self.hashes))
        else:
            self.ends = (*self.ends, len(self.hashes))
            self.masks = (*self.masks, mask)

    def change(self, start: int, end: int, bit: int, *, held: bool) -> None:
        """Set whether a slot holds the blocks from ``start`` to ``end``. May leave segments without
        holders, for :meth:`cut_end` and for the caller that divides the chunk.
        """
        ends: list[int] = []
        masks: list[int] = []
        begin = 0
        for stop, mask in zip(self.ends, self.masks, strict=True):
            changed = mask | bit if held else mask & ~bit
            for low, high, part in (
                (begin, min(stop, start), mask),
                (max(begin, start), min(stop, end), changed),
                (max(begin, end), stop, mask),
            ):
                if low < high:
                    if masks and masks[-1] == part:
                        ends[-1] = high
                    else:
                        ends.append(high)
                        masks.append(part)
            begin = stop
        self.ends = tuple(ends)
        self.masks = tuple(masks)

    def cut_end(self) -> list[BlockHash]:
        """Remove and return the blocks at the end that have no holder."""
        if self.masks[-1]:
            return []
        begin = self.ends[-2] if len(self.ends) > 1 else 0
        removed = self.hashes[begin:]
        del self.hashes[begin:]
        self.ends = self.ends[:-1]
        self.masks = self.masks[:-1]
        return removed

    def holders(self) -> set[int]:
        union = 0
        for mask in self.masks:
            union |= mask
        return set(bits(union))

    def parts(self, start: int, end: int) -> list[tuple[int, int, int]]:
        found = []
        begin = 0
        for stop, mask in zip(self.ends, self.masks, strict=True):
            low, high = max(begin, start), min(stop, end)
            if low < high:
                found.append((low, high, mask))
            begin = stop
        return found

    def cut(self, start: int, end: int) -> "Chunk":
        """Return a chunk of the blocks from ``start`` to ``end`` with their holders."""
        parts = self.parts(start, end)
        return Chunk(
            self.hashes[start:end],
            tuple(high - start for _, high, _ in parts),
            tuple(mask for _, _, mask in parts),
        )


def _common(one: list[BlockHash], other: list[BlockHash]) -> int:
    """Count the equal leading blocks of two lists of one length."""
    if one == other:
        return len(one)
    return next(
        i for i, (mine, theirs) in enumerate(zip(one, other, strict=True)) if mine != theirs
    )


_SHARDS = 256
"""Values of the hash byte that selects a shard."""


class ChunkTable:
    """Chunks by block, in many small dictionaries.

    One dictionary of a million blocks takes 50 ms to grow, which would block the event loop. Hashes
    are random, so all shards are of a size.
    """

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: tuple[dict[BlockHash, Chunk], ...] = tuple({} for _ in range(_SHARDS))

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __iter__(self) -> Iterator[BlockHash]:
        for shard in self._shards:
            yield from shard

    def get(self, block: BlockHash) -> Chunk | None:
        return self._shards[block[-1]].get(block)

    def put(self, blocks: Iterable[BlockHash], chunk: Chunk) -> None:
        shards = self._shards
        for block in blocks:
            shards[block[-1]][block] = chunk

    def remove(self, blocks: Iterable[BlockHash]) -> None:
        shards = self._shards
        for block in blocks:
            del shards[block[-1]][block]

    def new(self, blocks: list[BlockHash]) -> int:
        """Count the leading blocks that are unknown and distinct."""
        shards = self._shards
        for length, block in enumerate(blocks):
            if block in shards[block[-1]]:
                blocks = blocks[:length]
                break
        if len(set(blocks)) == len(blocks):
            return len(blocks)
        seen: set[BlockHash] = set()
        for block in blocks:
            if block in seen:
                break
            seen.add(block)
        return len(seen)
