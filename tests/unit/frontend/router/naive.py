"""The index as one would write it without regard to speed: the model ours is tested against."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.identity import BlockHash, Target, WorkerId
from frontend.router.index.kv_index import KvIndex


class NaiveIndex:
    """A counter of blocks per target and group."""

    def __init__(self) -> None:
        self.groups: dict[Target, dict[int, Counter[BlockHash]]] = {}
        self.suspended: set[Target] = set()

    def store(self, target: Target, hashes: Iterable[BlockHash], group: int = 0) -> None:
        self.groups.setdefault(target, {}).setdefault(group, Counter()).update(hashes)

    def remove(self, target: Target, hashes: Iterable[BlockHash], group: int = 0) -> None:
        blocks = self.groups.get(target, {}).get(group, Counter())
        for block in hashes:
            if blocks[block] > 1:
                blocks[block] -= 1
            else:
                del blocks[block]

    def clear(self, target: Target) -> None:
        self.groups.pop(target, None)

    def drop(self, worker_id: WorkerId) -> None:
        for target in [one for one in self.groups if one.worker_id == worker_id]:
            del self.groups[target]
        self.suspended = {one for one in self.suspended if one.worker_id != worker_id}

    def match(self, hashes: Sequence[BlockHash]) -> dict[Target, int]:
        depths = {}
        for target, groups in self.groups.items():
            depth = 0
            for block in hashes:
                if not all(block in blocks for blocks in groups.values()):
                    break
                depth += 1
            if depth and target not in self.suspended:
                depths[target] = depth
        return depths


class Shape(NamedTuple):
    """What an index consists of.

    Attributes:
        blocks: distinct block hashes held by anyone.
        holdings: pairs of slot and block, each duplicate counted once.
        chunks: runs of neighbouring blocks they stand in.
        unswept: chunks of retired slots.
    """

    blocks: int
    holdings: int
    chunks: int
    unswept: int


def shape(index: KvIndex) -> Shape:
    chunks = {index._chunks.get(block) for block in index._chunks}
    return Shape(
        len(index._chunks),
        sum(held.blocks for held in index._held.values()),
        len(chunks),
        sum(len(held.chunks) for _, held in index._retired),
    )
