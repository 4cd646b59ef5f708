"""In which chunk each block stands.

Many small dictionaries in place of one: a dictionary of a million blocks takes 50 ms to grow, in
which the event loop would stand still.
"""

from collections.abc import Iterable, Iterator

from common.identity import BlockHash
from frontend.router.index.chunk import Chunk

_SHARDS = 256
"""Possible values of the byte of a hash that says where it is."""


class ChunkTable:
    """Chunks by block. Hashes are as random as they look, so that all shards are of a size."""

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: tuple[dict[BlockHash, Chunk], ...] = tuple({} for _ in range(_SHARDS))

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __iter__(self) -> Iterator[BlockHash]:
        for shard in self._shards:
            yield from shard

    def get(self, block: BlockHash) -> Chunk | None:
        """The chunk of a block, if it is known."""
        return self._shards[block[-1]].get(block)

    def put(self, blocks: Iterable[BlockHash], chunk: Chunk) -> None:
        """Let blocks stand in a chunk, whether they stood in another or not."""
        shards = self._shards
        for block in blocks:
            shards[block[-1]][block] = chunk

    def remove(self, blocks: Iterable[BlockHash]) -> None:
        """Forget blocks, all of which are known."""
        shards = self._shards
        for block in blocks:
            del shards[block[-1]][block]

    def new(self, blocks: list[BlockHash]) -> int:
        """How many blocks at the beginning are unknown, and different from each other."""
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
