"""Media items that each worker holds, and those in its encoder cache. No I/O.

Two kinds of knowledge are kept apart. The frontend leaves out bytes only of items that a worker
*has acknowledged*. Items *on their way* only make that worker the better choice for the next
request with the same item.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from common.identity import MmHash, Target, WorkerId
from common.lru import Lru
from frontend.router.inputs import MediaNeed


class MediaPlacement:
    """LRU list of media items per worker.

    Args:
        capacity: items remembered per worker, and on their way to all workers; more than an
            engine's cache of processed media holds. Evicting an entry costs one redundant transfer
            at worst.
        expect_s: seconds for which an item counts as on its way.
    """

    def __init__(self, capacity: int = 10_000, expect_s: float = 5.0) -> None:
        self._capacity = capacity
        self._expect_s = expect_s
        self._held: dict[WorkerId, Lru[MmHash, MmHash]] = {}
        # Keyed by item for lookups by requests; ``_ages`` orders all by age.
        self._expected: dict[MmHash, dict[WorkerId, float]] = {}
        self._ages: OrderedDict[tuple[WorkerId, MmHash], float] = OrderedDict()
        self._workers: dict[MmHash, set[WorkerId]] = {}

    def add(self, worker_id: WorkerId) -> None:
        self._held.setdefault(worker_id, Lru(self._capacity))

    def acked(self, worker_id: WorkerId, mm_hashes: Iterable[MmHash]) -> None:
        """Note that a worker holds these items. Unknown workers are ignored."""
        held = self._held.get(worker_id)
        if held is None:
            return
        for mm_hash in mm_hashes:
            self._forget_expected(worker_id, mm_hash)
            self._workers.setdefault(mm_hash, set()).add(worker_id)
            for oldest in held.put(mm_hash, mm_hash):
                self._unlink(worker_id, oldest)

    def nacked(self, worker_id: WorkerId, mm_hashes: Iterable[MmHash]) -> None:
        """Note that a worker evicted these items."""
        held = self._held.get(worker_id)
        for mm_hash in mm_hashes:
            if held is not None:
                held.pop(mm_hash)
            self._forget_expected(worker_id, mm_hash)
            self._unlink(worker_id, mm_hash)

    def expect(self, worker_id: WorkerId, mm_hashes: Iterable[MmHash], now: float) -> None:
        """Note that a request with these items was routed to the worker."""
        held = self._held.get(worker_id, ())
        for mm_hash in mm_hashes:
            if mm_hash not in held:
                self._expected.setdefault(mm_hash, {})[worker_id] = now + self._expect_s
                self._ages[worker_id, mm_hash] = now + self._expect_s
                self._ages.move_to_end((worker_id, mm_hash))
        while self._ages and (
            next(iter(self._ages.values())) <= now or len(self._ages) > self._capacity
        ):
            self._forget_expected(*next(iter(self._ages)))

    def holds(self, worker_id: WorkerId, mm_hash: MmHash) -> bool:
        return mm_hash in self._held.get(worker_id, ())

    def items(self, worker_id: WorkerId) -> list[MmHash]:
        """Return the items that the worker acknowledged, the least recently used first."""
        return [*self._held.get(worker_id, ())]

    def count(self, worker_id: WorkerId) -> int:
        held = self._held.get(worker_id)
        return 0 if held is None else len(held)

    def holders(self, mm_hash: MmHash, now: float) -> set[WorkerId]:
        """Return a new set of the workers that hold the item or are about to."""
        workers = set(self._workers.get(mm_hash, ()))
        for worker_id, until in self._expected.get(mm_hash, {}).items():
            if until > now:
                workers.add(worker_id)
        return workers

    def touch(self, worker_id: WorkerId, mm_hashes: Iterable[MmHash]) -> None:
        """Note that the worker uses these items now, so that it will evict them last."""
        held = self._held.get(worker_id)
        if held is not None:
            for mm_hash in mm_hashes:
                held.get(mm_hash)

    def emptied(self, worker_id: WorkerId) -> None:
        if worker_id in self._held:
            self.drop(worker_id)
            self.add(worker_id)

    def drop(self, worker_id: WorkerId) -> None:
        for mm_hash in self._held.pop(worker_id, ()):
            self._unlink(worker_id, mm_hash)
        for pair in [pair for pair in self._ages if pair[0] == worker_id]:
            self._forget_expected(*pair)

    def _forget_expected(self, worker_id: WorkerId, mm_hash: MmHash) -> None:
        if self._ages.pop((worker_id, mm_hash), None) is not None:
            workers = self._expected[mm_hash]
            del workers[worker_id]
            if not workers:
                del self._expected[mm_hash]

    def _unlink(self, worker_id: WorkerId, mm_hash: MmHash) -> None:
        workers = self._workers.get(mm_hash)
        if workers is not None:
            workers.discard(worker_id)
            if not workers:
                del self._workers[mm_hash]


_MAX_ITEMS: Final = 4_096
"""Limit per target, since a card may claim any number of tokens: an item takes this share of the
room or more."""


class EncodedMedia:
    """For each target an LRU cache of the size of its encoder cache.

    An engine evicts an encoding only when it needs the room, which is small: as many tokens as a
    step prefills. The last block that an item touches mostly holds text of the question too. So a
    prompt whose picture is in the prefix cache still needs the encoding. Requests of other
    frontends are unknown. Source: ``EncoderCacheManager`` of vLLM 0.32.0 and 0.33.0.
    """

    def __init__(self) -> None:
        self._items: dict[Target, Lru[MmHash, int]] = {}

    def add(self, target: Target, tokens: int) -> None:
        """Register a target with room for some tokens, 0 if unknown."""
        least = max(1, tokens // _MAX_ITEMS)
        if tokens > 0:  # one item always has room
            self._items[target] = Lru(tokens, lambda taken: min(max(taken, least), tokens))
        else:
            self._items.pop(target, None)

    def drop(self, target: Target) -> None:
        self._items.pop(target, None)

    def emptied(self, target: Target) -> None:
        if target in self._items:
            self._items[target].clear()

    def used(self, target: Target, media: Iterable[MediaNeed]) -> None:
        """Note that a prompt needs these from the encoder. Unknown targets are ignored."""
        if (items := self._items.get(target)) is not None:
            for need in media:
                items.put(need.mm_hash, need.num_tokens)

    def holds(self, target: Target, mm_hash: MmHash) -> bool:
        return mm_hash in self._items.get(target, ())

    def knows(self, target: Target) -> bool:
        return target in self._items
