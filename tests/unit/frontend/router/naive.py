"""The index as one would write it without regard to speed: the model ours is tested against."""

from collections import Counter
from collections.abc import Iterable, Sequence

from common.identity import BlockHash, Target, WorkerId


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
