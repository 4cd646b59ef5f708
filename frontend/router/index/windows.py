"""Blocks of cache groups in which a prefix hit needs only the last few.

Groups of sliding-window layers and recurrent states drop blocks that no hit can use any more, so
they can only shorten a hit found in ``kv_index.py``.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from common.identity import BlockHash, Target, WorkerId


@dataclass(slots=True)
class _Group:
    needed: int
    peeks: bool
    copies: dict[BlockHash, int] = field(default_factory=dict)


class WindowIndex:
    def __init__(self) -> None:
        self._groups: dict[Target, dict[int, _Group]] = {}

    def targets(self) -> list[Target]:
        return list(self._groups)

    def groups(self, target: Target) -> int:
        return len(self._groups.get(target, ()))

    def knows(self, target: Target, group: int) -> bool:
        return group in self._groups.get(target, ())

    def store(
        self,
        target: Target,
        hashes: Iterable[BlockHash],
        group: int,
        needed: int,
        *,
        peeks: bool = True,
    ) -> None:
        """Note that a target holds blocks in a windowed group.

        Args:
            needed: how many blocks before its end a hit needs, at least 1.
            peeks: whether an engine that drops the last block of a hit does so in this group.
        """
        entry = self._groups.setdefault(target, {}).setdefault(group, _Group(needed, peeks))
        for block in hashes:
            entry.copies[block] = entry.copies.get(block, 0) + 1

    def remove(
        self, target: Target, hashes: Iterable[BlockHash], group: int, *, all_copies: bool = False
    ) -> None:
        """Note that a target dropped one copy of each block, or all. Unknown ones are ignored."""
        entry = self._groups.get(target, {}).get(group)
        if entry is None:
            return
        for block in hashes:
            copies = entry.copies.get(block, 0)
            if copies > 1 and not all_copies:
                entry.copies[block] = copies - 1
            elif copies:
                del entry.copies[block]

    def clear(self, target: Target) -> None:
        """Forget the blocks of a target, but not that it has such groups."""
        for group in self._groups.get(target, {}).values():
            group.copies.clear()

    def drop(self, worker_id: WorkerId) -> None:
        for target in [one for one in self._groups if one.worker_id == worker_id]:
            del self._groups[target]

    def holdings(self, target: Target) -> int:
        return sum(len(group.copies) for group in self._groups.get(target, {}).values())

    def tails(
        self, target: Target, hashes: Sequence[BlockHash], ends: Sequence[int], peek: int
    ) -> dict[int, list[BlockHash]]:
        """Return the blocks that each group keeps for hits ending after ``ends`` blocks of a
        prompt.
        """
        kept: dict[int, list[BlockHash]] = {}
        for number, group in self._groups.get(target, {}).items():
            ahead = peek if group.peeks else 0
            kept[number] = list(
                dict.fromkeys(
                    block
                    for end in ends
                    for block in hashes[max(0, end - group.needed) : end + ahead]
                )
            )
        return kept

    def trim(
        self,
        target: Target,
        hashes: Sequence[BlockHash],
        depth: int,
        peek: int = 0,
        indexes: "Sequence[WindowIndex] | None" = None,
    ) -> int:
        """Return the longest hit of at most ``depth`` blocks that every windowed group allows.

        A group allows a hit whose last ``needed`` blocks it holds, or a shorter one that it holds
        completely. Groups shorten in turn until all agree. Source:
        ``SlidingWindowManager.find_longest_cache_hit`` of vLLM 0.32.0 and 0.33.0.

        Args:
            hashes: the blocks that the engine looks at.
            peek: blocks beyond its end that a hit needs too: 1 where the engine drops the last
                block that it finds.
            indexes: a block counts as held if one of these has it; this one unless given.
        """
        groups = self._groups.get(target, {})
        shelves = [one._groups.get(target, {}) for one in indexes or (self,)]
        agreed = False
        while depth and not agreed:
            before = depth
            for number, group in groups.items():
                held = [shelf[number].copies for shelf in shelves if number in shelf]
                ahead = peek if group.peeks else 0
                depth = _trim(held, group.needed + ahead, hashes, depth, ahead)
            agreed = depth == before
        return depth


def _trim(
    held: Sequence[Container[BlockHash]],
    needed: int,
    hashes: Sequence[BlockHash],
    depth: int,
    ahead: int,
) -> int:
    run = 0
    for position in range(min(len(hashes), depth + ahead) - 1, -1, -1):
        block = hashes[position]
        run = run + 1 if any(block in one for one in held) else 0
        if run >= needed:
            return position + run - ahead
    return max(0, run - ahead)
