"""The router: one object that knows the fleet and decides where a request runs.

A facade over hashing, index, media placement, load and selection. It sends nothing
to workers; it only listens to their KV events. Everything happens on one event loop.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from common.errors import FleetBusyError, MmRouterError, NoWorkerError
from common.identity import BlockHash, Incarnation, MmHash, RequestId, Target, WorkerId
from common.supervised import supervise
from common.telemetry import (
    BUSY_WORKERS,
    DECISIONS,
    PREDICTED_CACHED_TOKENS,
    REALISED_CACHED_TOKENS,
)
from frontend.router.decision import (
    CLIENT_ID_LENGTH,
    Considered,
    Decision,
    DecisionLog,
    MediaMove,
)
from frontend.router.events import Feed, FeedMaker, StreamStatistics, ZmqFeeds
from frontend.router.hashing import BlockHasher, BlockMmInfos, HashMemo, HashScheme, block_mm_infos
from frontend.router.index import (
    BlockIndexes,
    IndexState,
    IndexStatistics,
    Knowledge,
    PredictionStatistics,
    approximate,
)
from frontend.router.request import MediaNeed, RoutingRequest
from frontend.router.selection import (
    BusyThresholds,
    Candidates,
    Circuit,
    Ejection,
    Estimate,
    Estimator,
    LoadTracker,
    MediaPlacement,
    MediaStatistics,
    Selector,
    TargetLoad,
    Work,
    cheapest,
)
from frontend.router.settings import RouterSettings
from frontend.router.worker import RoutableWorker

__all__ = ["MediaNeed", "RoutableWorker", "Router", "RouterStatistics", "RoutingRequest"]

_HOUSEKEEPING_S = 0.25
_EXPIRE_SLICE = 16
"""Requests whose predictions expire at a time."""

_SWEEP_SLICE = 2_000
"""Blocks swept at a time: well below a millisecond, between which others run."""


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """A look at every part of the router.

    Attributes:
        index: known blocks.
        predictions: predicted blocks.
        media: media items on workers.
        loads: load of every target.
        states: what is known of every target's cache.
        feeds: event counters of every target with an event source.
        decisions: decisions kept for inspection.
        in_flight: requests routed and not finished.
    """

    index: IndexStatistics
    predictions: PredictionStatistics
    media: MediaStatistics
    loads: dict[Target, TargetLoad]
    states: dict[Target, IndexState]
    feeds: dict[Target, StreamStatistics]
    decisions: int
    in_flight: int


@dataclass(slots=True)
class _InFlight:
    """What has to be undone or followed up when a request ends."""

    decision: Decision
    target: Target
    incarnation: Incarnation
    routed_at: float
    stores_blocks: bool


class _Fleet(NamedTuple):
    """All targets in the order of the load tracker; see :class:`Candidates`."""

    targets: Sequence[Target]
    slots: Sequence[int]
    positions: dict[Target, int]


class Router:
    """Decides where requests run.

    Args:
        settings: the operator's choices.
        clock: monotonic seconds.
        feeds: what follows workers' caches; their KV events over ZMQ unless given.
    """

    def __init__(
        self,
        settings: RouterSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        feeds: FeedMaker | None = None,
    ) -> None:
        self._settings = settings = RouterSettings() if settings is None else settings
        self._clock = clock
        self._feed_maker = feeds or ZmqFeeds(settings.silence_s, settings.replay_timeout_s, clock)
        self._indexes = BlockIndexes.empty(settings.approximate_blocks)
        self._media = MediaPlacement(settings.media_items, settings.predict_ttl_s)
        self._estimator = Estimator(self._indexes, self._media)
        self._selector = Selector(settings)
        self._load = LoadTracker(
            clock,
            settings.report_ttl_s,
            self._selector.load_cost,
            BusyThresholds(settings.busy_blocks_fraction, settings.busy_prefill_tokens),
        )
        self._ejection = Ejection(
            clock,
            failures=settings.eject_failures,
            base_s=settings.eject_base_s,
            max_s=settings.eject_max_s,
        )
        BUSY_WORKERS.set_function(lambda: len({one.worker_id for one in self._load.busy()}))
        self._log = DecisionLog(settings.decisions)
        self._workers: dict[WorkerId, RoutableWorker] = {}
        self._feeds: dict[WorkerId, Feed] = {}
        self._hashers: dict[HashScheme, HashMemo] = {}
        self._fleet = _Fleet((), (), {})
        self._in_flight: dict[RequestId, _InFlight] = {}
        self._housekeeper: asyncio.Task[None] | None = None

    @property
    def settings(self) -> RouterSettings:
        """The settings in force."""
        return self._settings

    @property
    def decisions(self) -> DecisionLog:
        """The last decisions."""
        return self._log

    # Fleet

    async def add_worker(self, worker: RoutableWorker) -> None:
        """Take a worker into the fleet and start listening to its KV events.

        Returns before its blocks are known: until then its state is ``degraded``.
        Adding the same incarnation again does nothing.

        Raises:
            ConfigurationError: its block hashes can't be computed here.
        """
        known = self._workers.get(worker.worker_id)
        if known == worker:
            return
        hasher = self._hashers.get(worker.scheme)
        if hasher is None:
            hasher = HashMemo(BlockHasher(*worker.scheme), self._settings.memo_tokens)
        if known is not None:
            await self.remove_worker(worker.worker_id)
        self._hashers[worker.scheme] = hasher
        self._workers[worker.worker_id] = worker
        for target in worker.targets:
            self._indexes.slots.open(target)
        self._media.add(worker.worker_id)
        self._load.add(worker.worker_id, worker.targets, worker.kv_tokens)
        if worker.prefix_caching and worker.event_sources:
            feed = self._feed_maker.feed(worker, self._indexes)
            self._feeds[worker.worker_id] = feed
            feed.start()
        self._list_fleet()
        if self._housekeeper is None:
            self._housekeeper = asyncio.create_task(
                supervise("router housekeeping", self._keep_house), name="router housekeeping"
            )

    async def remove_worker(self, worker_id: WorkerId) -> None:
        """Forget a worker: its blocks, media, load and events. Unknown ids are ignored.

        Its requests in flight may still be reported as finished.
        """
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        # Without awaiting: nothing may be routed there from now on.
        self._load.drop(worker_id)
        self._list_fleet()
        self._indexes.drop(worker_id)
        self._media.drop(worker_id)
        if all(other.scheme != worker.scheme for other in self._workers.values()):
            self._hashers.pop(worker.scheme, None)
        feed = self._feeds.pop(worker_id, None)
        if feed is not None:
            await feed.close()

    async def close(self) -> None:
        """Remove all workers and stop every task. The router is of no use afterwards."""
        if self._housekeeper is not None:
            self._housekeeper.cancel()
            await asyncio.gather(self._housekeeper, return_exceptions=True)
            self._housekeeper = None
        for worker_id in list(self._workers):
            await self.remove_worker(worker_id)
        self._feed_maker.close()

    def targets(self) -> list[Target]:
        """All targets a request could go to."""
        return list(self._fleet.targets)

    def workers(self) -> list[RoutableWorker]:
        """All workers of the fleet."""
        return list(self._workers.values())

    def state(self, target: Target) -> IndexState:
        """What is known of a target's cache."""
        feed = self._feeds.get(target.worker_id)
        if feed is not None:
            return feed.state(target.rank)
        worker = self._workers.get(target.worker_id)
        if worker is not None and not worker.prefix_caching:
            return approximate("the worker runs without prefix caching")
        return approximate("the worker's card names no KV event source")

    # Requests

    def hash(self, request: RoutingRequest) -> dict[HashScheme, list[BlockHash]]:
        """The prompt's block hashes under every scheme of the fleet, usually one.

        About 1 µs a block, and 0.2 µs in a beginning that a recent prompt shares. Long
        prompts are better hashed in another thread, which is safe here, and passed to
        :meth:`route` as :attr:`RoutingRequest.hashes`.

        Raises:
            RequestRejectedError: the prompt can't be hashed.
        """
        return {
            scheme: self._hash_for(request, hasher)
            for scheme, hasher in list(self._hashers.items())
        }

    @staticmethod
    def block_mm_infos(request: RoutingRequest, block_size: int) -> list[BlockMmInfos]:
        """The media items that each full block of the request's prompt touches."""
        spans = [need.span for need in request.media]
        return block_mm_infos(len(request.token_ids), block_size, spans)

    def route(
        self,
        request: RoutingRequest,
        *,
        exclude: Collection[WorkerId] = (),
        accepted: bool = False,
    ) -> Decision:
        """Decide where a request runs, and count it as running there.

        Args:
            exclude: workers not to consider, such as those that failed on it before.
            accepted: whether it was accepted before, and is not refused because all are busy.

        Raises:
            NoWorkerError: no worker is left.
            FleetBusyError: every worker has more to do than it should.
            RequestRejectedError: the prompt can't be hashed.
        """
        started = time.perf_counter()
        candidates = self._candidates(exclude, accepted)
        now = self._clock()
        hashes = dict(request.hashes or {})
        for scheme, hasher in self._hashers.items():
            if scheme not in hashes:
                hashes[scheme] = self._hash_for(request, hasher)
        estimate = self._estimator.estimate(request, hashes, now)
        costs = candidates.costs(estimate, self._selector.work_cost)
        prompt_tokens = len(request.token_ids)
        choice = self._selector.choose(
            candidates.targets, costs, candidates.loads, candidates.slots, prompt_tokens
        )
        target = candidates.targets[choice.position]
        work = estimate.on(target)
        worker = self._workers[target.worker_id]
        state = self.state(target)
        decision = Decision(
            request_id=request.request_id,
            worker_id=target.worker_id,
            rank=target.rank,
            mode=self._settings.mode.value,
            reason=estimate.advantage(target) if choice.reason == "cost" else choice.reason,
            index=state.knowledge.value,
            time=time.time(),
            micros=0.0,
            prompt_tokens=prompt_tokens,
            prompt_blocks=prompt_tokens // worker.block_size,
            overlap_blocks=work.overlap_blocks,
            predicted_cached_tokens=work.overlap_blocks * worker.block_size,
            considered=self._considered(candidates, costs, estimate, choice.position),
            candidates_total=len(candidates.targets),
            client_id=request.client_id[:CLIENT_ID_LENGTH],
            incarnation=worker.incarnation,
        )
        self._follow(request, decision, target, worker, work, hashes[worker.scheme], state, now)
        decision.micros = (time.perf_counter() - started) * 1e6
        return decision

    def check_room(self) -> None:
        """Raises what :meth:`route` would raise now, before there is a prompt."""
        self._candidates((), accepted=False)

    def first_token(self, request_id: RequestId) -> None:
        """A request's first output arrived. Unknown and repeated ids are ignored."""
        self._load.first_token(request_id)
        flight = self._in_flight.get(request_id)
        if flight is not None:
            self._ejection.succeeded(flight.target.worker_id)

    def finished(self, request_id: RequestId, realised_cached_tokens: int | None = None) -> None:
        """A request ended in any way. Unknown and repeated ids are ignored.

        Args:
            realised_cached_tokens: prompt tokens its engine took from its cache; ``None``
                if the request got no output.
        """
        self._load.finished(request_id)
        flight = self._in_flight.pop(request_id, None)
        if flight is None:
            return
        self._ejection.ended(flight.target.worker_id, request_id)
        feed = self._feeds.get(flight.target.worker_id)
        if realised_cached_tokens is None:
            self._indexes.predicted.forget(request_id)
            return
        flight.decision.realised_cached_tokens = realised_cached_tokens
        REALISED_CACHED_TOKENS.labels(flight.target.worker_id).inc(realised_cached_tokens)
        worker = self._workers.get(flight.target.worker_id)
        if feed is None or worker is None or worker.incarnation != flight.incarnation:
            return
        # What was predicted stays until it expires: the engine may finish a short request
        # before its events are out, and an eviction takes the prediction back as well.
        if flight.stores_blocks:
            feed.served(flight.target.rank, flight.routed_at)

    def failed(self, decision: Decision, error: MmRouterError) -> None:
        """A request failed where it was decided to run; perhaps it was the worker's fault.

        Not that of its successor under the same name.
        """
        worker = self._workers.get(decision.worker_id)
        if worker is None or worker.incarnation != decision.incarnation:
            return
        if error.blames_worker:
            self._ejection.failed(worker.worker_id, worker.incarnation, type(error).__name__)

    # Workers' news

    def link_lost(self, worker_id: WorkerId, incarnation: Incarnation, reason: str) -> None:
        """A worker could not be reached any more; it is not trusted at once if it comes back.

        Args:
            reason: a short constant, for counters.
        """
        self._ejection.eject(worker_id, incarnation, reason)

    def forget_worker(self, worker_id: WorkerId) -> None:
        """A worker is gone for good: nothing is held against its successor."""
        self._ejection.forget(worker_id)

    def circuit(self, worker_id: WorkerId) -> tuple[Circuit, str]:
        """How far a worker is trusted, and why no further."""
        return self._ejection.circuit(worker_id)

    def is_busy(self, target: Target) -> bool:
        """Whether a target gets no new requests because it has too much to do."""
        return target in self._load.busy()

    def media_acked(self, worker_id: WorkerId, mm_hashes: Iterable[MmHash]) -> None:
        """A worker confirmed that it holds media items."""
        self._media.acked(worker_id, mm_hashes)

    def media_nacked(self, worker_id: WorkerId, mm_hashes: Iterable[MmHash]) -> None:
        """A worker turned out to lack media items, or evicted them."""
        self._media.nacked(worker_id, mm_hashes)

    def holds_media(self, worker_id: WorkerId, mm_hash: MmHash) -> bool:
        """Whether a worker confirmed an item, so that it need not be sent."""
        return self._media.holds(worker_id, mm_hash)

    def media_moved(
        self, request_id: RequestId, mm_hash: MmHash, how: str, nbytes: int, transport: str
    ) -> None:
        """Note in the request's decision how an item reached the worker."""
        decision = self._log.get(request_id)
        if decision is not None:
            decision.media.append(MediaMove(mm_hash, how, nbytes, transport))

    def worker_reported(
        self,
        worker_id: WorkerId,
        *,
        running: int,
        waiting: int,
        queued_tokens: int,
        kv_usage: float,
    ) -> None:
        """A worker's report of its own load; see :meth:`LoadTracker.reported`."""
        self._load.reported(
            worker_id,
            running=running,
            waiting=waiting,
            queued_tokens=queued_tokens,
            kv_usage=kv_usage,
        )

    def statistics(self) -> RouterStatistics:
        """A look at every part."""
        return RouterStatistics(
            index=self._indexes.known.statistics(),
            predictions=self._indexes.predicted.statistics(),
            media=self._media.statistics(),
            loads=self._load.statistics(),
            states={target: self.state(target) for target in self._fleet.targets},
            feeds={
                Target(worker_id, rank): counts
                for worker_id, feed in self._feeds.items()
                for rank, counts in feed.statistics().items()
            },
            decisions=len(self._log),
            in_flight=len(self._in_flight),
        )

    # Inner workings

    def _hash_for(self, request: RoutingRequest, hasher: HashMemo) -> list[BlockHash]:
        infos = self.block_mm_infos(request, hasher.scheme.block_size) if request.media else ()
        return hasher.hash(
            request.token_ids,
            infos,
            lora=request.lora,
            cache_salt=request.cache_salt,
        )

    def _candidates(self, exclude: Collection[WorkerId], accepted: bool) -> Candidates:
        loads, load_costs = self._load.view()
        targets, slots, positions = self._fleet
        candidates = Candidates(targets, slots, loads, load_costs, positions)
        if exclude:
            candidates = candidates.without(exclude)
        if not candidates.targets:
            raise NoWorkerError(
                "no worker is registered"
                if not self._workers
                else "every registered worker is excluded or failed on this request"
            )
        return self._fit(candidates, accepted)

    def _fit(self, candidates: Candidates, accepted: bool) -> Candidates:
        """Those that are neither ejected nor busy.

        If all are ejected, the least bad of them. If all are busy, none, unless the
        request was accepted before.
        """
        if unusable := self._ejection.unusable():
            trusted = candidates.without(unusable)
            if not trusted.targets:
                workers = {target.worker_id for target in candidates.targets}
                least_bad = self._ejection.least_bad(workers)
                trusted = candidates.only(lambda target: target.worker_id in least_bad)
            candidates = trusted
        if busy := self._load.busy():
            free = candidates.only(lambda target: target not in busy)
            if free.targets:
                return free
            if not accepted:
                raise FleetBusyError("every worker is busy: try again later")
        return candidates

    def _considered(
        self, candidates: Candidates, costs: Sequence[float], estimate: Estimate, chosen: int
    ) -> list[Considered]:
        """The cheapest candidates, for the record."""
        return [
            Considered(
                candidates.targets[position],
                self.state(candidates.targets[position]).knowledge,
                estimate.on(candidates.targets[position]),
                candidates.loads[position],
                costs[position],
            )
            for position in cheapest(costs, self._settings.candidates, chosen)
        ]

    def _follow(
        self,
        request: RoutingRequest,
        decision: Decision,
        target: Target,
        worker: RoutableWorker,
        work: Work,
        hashes: list[BlockHash],
        state: IndexState,
        now: float,
    ) -> None:
        """Account for a decision: load, predictions, media on their way, metrics, log."""
        request_id = request.request_id
        self._load.started(
            request_id, target, work.prefill_tokens + work.media_tokens, decision.prompt_tokens
        )
        if worker.prefix_caching:
            exact = state.knowledge is Knowledge.EXACT
            self._indexes.predicted.predict(
                request_id,
                target,
                # Blocks known from events need no prediction beside them.
                hashes[work.overlap_blocks :] if exact else hashes,
                self._settings.predict_ttl_s if exact else self._settings.approximate_ttl_s,
                now,
            )
        if request.media:
            mm_hashes = [need.mm_hash for need in request.media]
            self._media.touch(target.worker_id, mm_hashes)
            self._media.expect(target.worker_id, mm_hashes, now)
        self._in_flight[request_id] = _InFlight(
            decision,
            target,
            worker.incarnation,
            now,
            stores_blocks=decision.overlap_blocks < decision.prompt_blocks,
        )
        self._ejection.routed(target.worker_id, request_id)
        self._log.add(decision)
        DECISIONS.labels(target.worker_id, decision.reason).inc()
        PREDICTED_CACHED_TOKENS.labels(target.worker_id).inc(decision.predicted_cached_tokens)

    def _list_fleet(self) -> None:
        targets = self._load.targets()
        self._fleet = _Fleet(
            targets,
            [self._workers[target.worker_id].max_num_seqs for target in targets],
            {target: position for position, target in enumerate(targets)},
        )
        self._estimator.set_fleet(self._workers)

    async def _keep_house(self) -> None:
        """Expire predictions, free swept memory, and let feeds look at their clocks."""
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            now = self._clock()
            for feed in list(self._feeds.values()):
                feed.tick(now)
            await _in_slices(partial(self._indexes.predicted.expire, now, _EXPIRE_SLICE))
            for index in (self._indexes.known, self._indexes.predicted.index):
                await _in_slices(partial(index.sweep, _SWEEP_SLICE))


async def _in_slices(work: Callable[[], bool]) -> None:
    """Call until it says that nothing is left, letting others run in between."""
    more = True
    while more:
        more = work()
        await asyncio.sleep(0)
