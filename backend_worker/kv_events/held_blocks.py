"""Compact set of the blocks that an engine holds, built from its KV events. Neighbouring blocks
form runs, as in the prompts that they come from. ``event_publisher.py`` describes the events."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from vllm.distributed.kv_events import BlockStored

Hash: TypeAlias = bytes | int  # vLLM's hash of a block: whole, or cut to 64 bits

MAX_IN_RUN = 256  # blocks in one run. To remove one from its middle takes time in proportion


class Shelf(NamedTuple):
    """Storage within which copies of a block are counted: a KV cache group, on or off the
    accelerator. Off it a block is held or not, however often announced. On it each announcement is
    a copy of its own."""

    group: int
    offloaded: bool


Kind: TypeAlias = BlockStored  # without blocks: the common fields of a run's blocks


class Run:
    """Held blocks of one shelf and kind, a chain. The first one's parent need not be held."""

    __slots__ = ("hashes", "kind", "parent")

    def __init__(self, hashes: list[Hash], parent: Hash | None, kind: Kind) -> None:
        self.hashes = hashes
        self.parent = parent
        self.kind = kind


class HeldBlocks:
    def __init__(self) -> None:
        self._shelves: dict[Shelf, _Held] = {}

    def __len__(self) -> int:
        """Count each block once per shelf."""
        return sum(len(shelf.owners) for shelf in self._shelves.values())

    @property
    def to_tell(self) -> int:
        """Number of blocks that :meth:`told` yields, copies included."""
        return len(self) + sum(sum(shelf.copies.values()) for shelf in self._shelves.values())

    def store(
        self,
        shelf: Shelf,
        hashes: list[Hash],
        parent: Hash | None,
        kind: Kind,
        *,
        chained: bool,
    ) -> None:
        """Store blocks, the first behind ``parent``; ``chained`` if each is the child of the one
        before. Parents are kept only for chained blocks."""
        held = self._shelves.get(shelf)
        if held is None:
            held = self._shelves[shelf] = _Held(kind, counted=not shelf.offloaded)
        if chained and held.lacks(hashes):
            held.add(hashes, parent, kind)
            return
        before = parent
        for one in hashes:
            held.add_or_count(one, before if chained else None, kind)
            before = one

    def remove(self, shelf: Shelf, hashes: Sequence[Hash]) -> None:
        """Remove one copy of each of these blocks. Unknown blocks are ignored."""
        held = self._shelves.get(shelf)
        if held is not None:
            for one in hashes:
                held.remove(one)

    def clear(self) -> None:
        self._shelves.clear()

    def told(self) -> Iterator[tuple[Run, int]]:
        """Yield runs with repeat counts that rebuild this set, each after its parent's; no changes
        meanwhile. An emptied shelf yields an empty run: a hit needs every used group."""
        for shelf in self._shelves.values():
            if not shelf.owners:
                yield Run([], None, shelf.kind), 1
            for run in shelf.in_order():
                yield run, 1
            for one, more in shelf.copies.items():
                yield Run([one], None, shelf.owners[one].kind), more


class _Held:
    """One shelf: the run of each block, and its number of further copies."""

    __slots__ = ("_counted", "_runs", "copies", "kind", "owners")

    def __init__(self, kind: Kind, *, counted: bool) -> None:
        self.kind = kind
        self._counted = counted
        self._runs: dict[Run, None] = {}
        self.owners: dict[Hash, Run] = {}
        self.copies: dict[Hash, int] = {}

    def lacks(self, hashes: list[Hash]) -> bool:
        """Return whether no block is held already or occurs twice."""
        if not self.owners.keys().isdisjoint(hashes):
            return False
        return len(hashes) == 1 or len(set(hashes)) == len(hashes)

    def add(self, hashes: list[Hash], parent: Hash | None, kind: Kind) -> None:
        """Add a chain of blocks that are not held."""
        while hashes:
            run = None if parent is None else self.owners.get(parent)
            if (
                run is None
                or run.hashes[-1] != parent
                or run.kind != kind
                or len(run.hashes) >= MAX_IN_RUN
            ):
                run = Run([], parent, kind)
                self._runs[run] = None
            fit = hashes[: MAX_IN_RUN - len(run.hashes)]
            run.hashes += fit
            self.owners.update(dict.fromkeys(fit, run))
            parent, hashes = fit[-1], hashes[len(fit) :]

    def add_or_count(self, block: Hash, parent: Hash | None, kind: Kind) -> None:
        if block not in self.owners:
            self.add([block], parent, kind)
        elif self._counted:
            self.copies[block] = self.copies.get(block, 0) + 1

    def remove(self, block: Hash) -> None:
        if self.copies and (more := self.copies.pop(block, 0)):
            if more > 1:
                self.copies[block] = more - 1
            return
        run = self.owners.pop(block, None)
        if run is None:
            return
        hashes = run.hashes
        if hashes[-1] == block:  # as evictions do
            hashes.pop()
        elif hashes[0] == block:
            del hashes[0]
            run.parent = block
        else:
            self._part(run, hashes.index(block))
        if not hashes:
            del self._runs[run]

    def _part(self, run: Run, place: int) -> None:
        """Remove the block at ``place``; the blocks after it become a new run."""
        rest = Run(run.hashes[place + 1 :], run.hashes[place], run.kind)
        del run.hashes[place:]
        self._runs[rest] = None
        self.owners.update(dict.fromkeys(rest.hashes, rest))

    def in_order(self) -> Iterator[Run]:
        """Yield all runs, each after its parent's."""
        seen: set[Run] = set()
        for one in self._runs:
            line: list[Run] = []
            run: Run | None = one
            # A parent may have been stored again later. Ends even if hashes form a cycle.
            while run is not None and run not in seen:
                seen.add(run)
                line.append(run)
                run = None if run.parent is None else self.owners.get(run.parent)
            yield from reversed(line)
