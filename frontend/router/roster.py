"""The routable workers, with the state that lives and dies with each.

Knowledge of a worker's blocks, media and load begins when it joins and ends when it leaves. Its
circuit outlives it: ``ejection.py``.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from common.aio.supervised import supervise
from common.identity import Incarnation, MmHash, Target, WorkerId
from common.request_plane.step_sums import StepSums
from frontend.router.events import StreamStatistics
from frontend.router.hashing import BlockHasher, HashMemo, HashScheme, LoraKey
from frontend.router.index import PREDICT_TTL_S, BlockIndexes, IndexState, Knowledge, approximate
from frontend.router.inputs import RoutableWorker
from frontend.router.selection import (
    BusyThresholds,
    Candidates,
    EncodedMedia,
    Estimator,
    LoadTracker,
    MediaPlacement,
    StepTimes,
    cost_of_load,
)
from frontend.router.settings import RouterSettings

_PAUSE_S = 0.25
_EXPIRE_SLICE = 16
"""Requests whose predictions expire at a time."""

_SWEEP_SLICE = 2_000
"""Blocks swept between two yields to the event loop: well below a millisecond."""


class Feed(Protocol):
    """Keep the indexes in step with the cache of one incarnation of a worker."""

    def start(self) -> None:
        """Start. Must not wait for the worker."""

    async def close(self) -> None:
        """Stop. Nothing is applied from the call on, even if it is cancelled."""

    def state(self, rank: int) -> IndexState:
        """Return how far the index of a rank can be trusted."""

    def served(self, rank: int, routed_at: float) -> None:
        """Note the end of a request that must have stored blocks, routed at a monotonic time."""

    def emptied(self, at: float) -> None:
        """Note when the worker cleared all its blocks: epoch seconds by its clock, 0 for never."""

    def tick(self, now: float) -> None:
        """Check time-outs; called a few times a second with monotonic seconds."""

    def statistics(self) -> dict[int, StreamStatistics]: ...


class FeedMaker(Protocol):
    """Factory of a router's feeds."""

    def feed(self, worker: RoutableWorker, indexes: BlockIndexes) -> Feed:
        """Return a feed, not yet started, of a worker whose targets are registered."""

    def close(self) -> None:
        """Free resources shared by feeds, which are all closed."""


async def keep_house(
    indexes: BlockIndexes, feeds: Mapping[WorkerId, Feed], clock: Callable[[], float]
) -> None:
    """Tick feeds (a live view), expire predictions and sweep indexes, forever."""
    while True:
        await asyncio.sleep(_PAUSE_S)
        now = clock()
        for feed in list(feeds.values()):
            feed.tick(now)
        await _in_slices(partial(indexes.predicted.expire, now, _EXPIRE_SLICE))
        for index in (indexes.known, indexes.predicted.index):
            await _in_slices(partial(index.sweep, _SWEEP_SLICE))


async def _in_slices(work: Callable[[], bool]) -> None:
    """Call ``work`` until it returns False, yielding to the event loop in between."""
    more = True
    while more:
        more = work()
        await asyncio.sleep(0)


class _Held(NamedTuple):
    incarnation: Incarnation
    items: list[MmHash]


class Roster:
    """The workers and their state. ``workers`` and ``hashers`` (by scheme) are live views."""

    def __init__(
        self, settings: RouterSettings, clock: Callable[[], float], feeds: FeedMaker
    ) -> None:
        self._clock = clock
        self._feed_maker = feeds
        self.indexes = BlockIndexes.empty()
        self.media = MediaPlacement(expect_s=PREDICT_TTL_S)
        self.load = LoadTracker(
            clock,
            price=cost_of_load,
            thresholds=BusyThresholds(settings.busy_blocks_fraction, settings.busy_prefill_tokens),
        )
        self.encoded = EncodedMedia()
        self.estimator = Estimator(self.indexes, self.media, self.encoded)
        self.times = StepTimes(clock)
        self._workers: dict[WorkerId, RoutableWorker] = {}
        self._held: dict[WorkerId, _Held] = {}
        self._hashers: dict[HashScheme, HashMemo] = {}
        self.feeds: dict[WorkerId, Feed] = {}
        self.workers: Mapping[WorkerId, RoutableWorker] = self._workers
        self.hashers: Mapping[HashScheme, HashMemo] = self._hashers
        self._listing = Candidates((), (), (), (), [], {})  # without loads
        self._housekeeper: asyncio.Task[None] | None = None

    async def add(self, worker: RoutableWorker) -> None:
        """Add a worker; its state is ``degraded`` until its KV events are complete. Raises
        ConfigurationError if its block hashes can't be computed here.
        """
        known = self._workers.get(worker.worker_id)
        if known == worker:
            return
        hasher = self._hashers.get(worker.scheme)
        if hasher is None:
            hasher = HashMemo(BlockHasher(*worker.scheme))
        if known is not None:
            await self.remove(worker.worker_id)
        self._hashers[worker.scheme] = hasher
        self._workers[worker.worker_id] = worker
        for target in worker.targets:
            self.indexes.slots.open(target)
            self.encoded.add(target, worker.encoder_tokens)
        self.media.add(worker.worker_id)
        held = self._held.pop(worker.worker_id, None)
        if held is not None and held.incarnation == worker.incarnation:
            # Only the connection was lost. Items evicted since then are requested by a Nack.
            self.media.acked(worker.worker_id, held.items)
        self.load.add(worker.worker_id, worker.targets, worker.kv_tokens, worker.max_num_seqs)
        if worker.prefix_caching and worker.event_sources:
            feed = self._feed_maker.feed(worker, self.indexes)
            self.feeds[worker.worker_id] = feed
            feed.start()
        self._list()
        if self._housekeeper is None:
            work = partial(keep_house, self.indexes, self.feeds, self._clock)
            self._housekeeper = asyncio.create_task(
                supervise("router housekeeping", work), name="router housekeeping"
            )

    async def remove(self, worker_id: WorkerId) -> None:
        """Forget a worker: its blocks, load and events. Unknown ids are ignored.

        Its media are forgotten too, unless the same run is added again before :meth:`forget`. Its
        requests in flight may still be reported as finished.
        """
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        # No await until here: requests must not be routed there from now on.
        self.load.drop(worker_id)
        for target in worker.targets:
            self.times.drop(target)
            self.encoded.drop(target)
        self._list()
        self.indexes.drop(worker_id)
        self._held[worker_id] = _Held(worker.incarnation, self.media.items(worker_id))
        self.media.drop(worker_id)
        if all(other.scheme != worker.scheme for other in self._workers.values()):
            self._hashers.pop(worker.scheme, None)
        feed = self.feeds.pop(worker_id, None)
        if feed is not None:
            await feed.close()

    def forget(self, worker_id: WorkerId) -> None:
        """Forget the media of a removed worker that does not come back."""
        self._held.pop(worker_id, None)

    async def close(self) -> None:
        """Remove all workers and stop every task. The roster is unusable afterwards."""
        if self._housekeeper is not None:
            self._housekeeper.cancel()
            await asyncio.gather(self._housekeeper, return_exceptions=True)
            self._housekeeper = None
        for worker_id in list(self._workers):
            await self.remove(worker_id)
        self._feed_maker.close()

    def adapters_changed(
        self, worker_id: WorkerId, adapters: frozenset[LoraKey], active: frozenset[str]
    ) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._workers[worker_id] = replace(worker, adapters=adapters, active_adapters=active)

    def targets(self) -> list[Target]:
        return list(self._listing.targets)

    def candidates(self) -> Candidates:
        loads, load_costs = self.load.view()
        targets, slots, _, _, paces, positions = self._listing
        return Candidates(targets, slots, loads, load_costs, paces, positions)

    def has(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether a worker is present in just this run, not a successor of its name."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.incarnation == incarnation

    def state(self, target: Target) -> IndexState:
        feed = self.feeds.get(target.worker_id)
        if feed is not None:
            return feed.state(target.rank)
        worker = self._workers.get(target.worker_id)
        if worker is not None and not worker.prefix_caching:
            return approximate("the worker runs without prefix caching")
        return approximate("the worker's card names no KV event source")

    def blocks(self, target: Target) -> int:
        return self.indexes.holdings(target)

    def knowledge(self) -> dict[Knowledge, int]:
        states = Counter(self.state(target).knowledge for target in self._listing.targets)
        return {knowledge: states[knowledge] for knowledge in Knowledge}

    def blocks_emptied(self, worker_id: WorkerId, at: float) -> None:
        """Note when a worker cleared its blocks (epoch seconds by its clock, 0 for never): its
        events say so only with the engine's next step.
        """
        feed, worker = self.feeds.get(worker_id), self._workers.get(worker_id)
        if feed is not None:
            feed.emptied(at)
        elif worker is not None and at:
            for target in worker.targets:
                self.indexes.clear(target)

    def media_emptied(self, worker_id: WorkerId) -> None:
        self.media.emptied(worker_id)
        if (worker := self._workers.get(worker_id)) is not None:
            for target in worker.targets:
                self.encoded.emptied(target)

    def stepped(self, worker_id: WorkerId, steps: Sequence[StepSums]) -> None:
        """Take the sums over a worker's steps. Unknown workers are ignored."""
        worker = self._workers.get(worker_id)
        if worker is None or not steps:
            return
        all_changed = self.times.reported(worker_id, steps)
        *_, paces, positions = self._listing
        now = self._clock()
        for target in positions if all_changed else worker.targets:
            paces[positions[target]] = self.times.rounded_pace(target, now)

    def served(self, target: Target, routed_at: float) -> None:
        feed = self.feeds.get(target.worker_id)
        if feed is not None:
            feed.served(target.rank, routed_at)

    def _list(self) -> None:
        targets, now = self.load.targets(), self._clock()
        self._listing = Candidates(
            targets,
            [self._workers[target.worker_id].max_num_seqs for target in targets],
            (),
            (),
            [self.times.rounded_pace(target, now) for target in targets],
            {target: position for position, target in enumerate(targets)},
        )
        self.estimator.set_fleet(self._workers)
