"""Blocks of cache groups in which a prefix hit needs only the last few.

Sliding-window layers and recurrent states: such a group drops blocks that no hit can
use any more, so it can only shorten a hit found in ``kv_index.py``, never make one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.identity import BlockHash, Target, WorkerId


@dataclass(slots=True)
class _Group:
    needed: int
    copies: dict[BlockHash, int] = field(default_factory=dict)


class WindowIndex:
    """Windowed groups of all targets."""

    def __init__(self) -> None:
        self._groups: dict[Target, dict[int, _Group]] = {}

    def targets(self) -> list[Target]:
        """Targets that have such groups."""
        return list(self._groups)

    def knows(self, target: Target, group: int) -> bool:
        """Whether the target stored blocks in this group."""
        return group in self._groups.get(target, ())

    def store(self, target: Target, hashes: Iterable[BlockHash], group: int, needed: int) -> None:
        """Note that a target holds blocks in a windowed group.

        Args:
            needed: how many blocks before its end a hit needs.
        """
        entry = self._groups.setdefault(target, {}).setdefault(group, _Group(needed))
        for block in hashes:
            entry.copies[block] = entry.copies.get(block, 0) + 1

    def remove(self, target: Target, hashes: Iterable[BlockHash], group: int) -> None:
        """Note that a target dropped one copy of each block. Unknown ones are ignored."""
        entry = self._groups.get(target, {}).get(group)
        if entry is None:
            return
        for block in hashes:
            copies = entry.copies.get(block, 0)
            if copies > 1:
                entry.copies[block] = copies - 1
            elif copies:
                del entry.copies[block]

    def clear(self, target: Target) -> None:
        """Forget the blocks of a target."""
        self._groups.pop(target, None)

    def drop(self, worker_id: WorkerId) -> None:
        """Forget a worker with all its ranks."""
        for target in [one for one in self._groups if one.worker_id == worker_id]:
            del self._groups[target]

    def holdings(self, target: Target) -> int:
        """Blocks of a target, summed over its windowed groups."""
        return sum(len(group.copies) for group in self._groups.get(target, {}).values())

    def trim(self, target: Target, hashes: Sequence[BlockHash], depth: int) -> int:
        """The longest hit of at most ``depth`` blocks that every windowed group allows.

        A group allows a hit whose last ``needed`` blocks it holds; one shorter than that
        it allows if it holds all of it. Groups shorten in turn until all agree. Source:
        ``SlidingWindowManager.find_longest_cache_hit`` of vLLM 0.32.0.
        """
        groups = self._groups.get(target, {}).values()
        agreed = False
        while depth and not agreed:
            before = depth
            for group in groups:
                depth = _trim(group, hashes, depth)
            agreed = depth == before
        return depth


def _trim(group: _Group, hashes: Sequence[BlockHash], depth: int) -> int:
    run = 0
    for position in range(depth - 1, -1, -1):
        run = run + 1 if hashes[position] in group.copies else 0
        if run >= group.needed:
            return position + run
    return run
