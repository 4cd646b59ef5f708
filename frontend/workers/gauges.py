"""Metrics of all fleets of this process and their routers, computed when ``/metrics`` is read."""

from collections.abc import Iterator
from functools import partial

from common.identity import Target
from common.observability.live_metrics import Row
from common.observability.telemetry import INDEX_RANKS, KV_EVENTS, RANK_LOAD, RANK_REQUESTS, WORKERS
from frontend.router import Knowledge, Router
from frontend.workers.contract import Refusals
from frontend.workers.members import Member, Members


class Gauges:
    """Aggregate the metrics of fleets. Only the newest instance is exported."""

    def __init__(self) -> None:
        self._fleets: list[tuple[Members, Router]] = []
        self._refusals: list[Refusals] = []
        for state, count in (
            ("connected", self._connected),
            ("disconnected", self._disconnected),
            ("refused", lambda: sum(len(each.reasons()) for each in self._refusals)),
            ("ejected", lambda: sum(router.ejection.out() for _, router in self._fleets)),
            ("busy", lambda: sum(_busy(router) for _, router in self._fleets)),
        ):
            WORKERS.labels(state).set_function(count)
        for knowledge in Knowledge:
            INDEX_RANKS.labels(knowledge).set_function(partial(self._ranks, knowledge))
        RANK_LOAD.set_function(self._rank_load)
        RANK_REQUESTS.set_function(self._rank_requests)
        KV_EVENTS.set_function(self._kv_events)

    def add(
        self, refusals: Refusals, members: Members | None = None, router: Router | None = None
    ) -> None:
        """Include the refusals of a fleet, or of all, and the members and router of a fleet."""
        if members is not None and router is not None:
            self._fleets.append((members, router))
        self._refusals.append(refusals)

    def remove(self, refusals: Refusals, members: Members) -> None:
        self._fleets = [each for each in self._fleets if each[0] is not members]
        self._refusals = [each for each in self._refusals if each is not refusals]

    def _available(self) -> Iterator[tuple[Member, Router]]:
        for members, router in self._fleets:
            for member in members.available():
                yield member, router

    def _connected(self) -> int:
        return sum(1 for _ in self._available())

    def _disconnected(self) -> int:
        return sum(len(each.shown()) for each, _ in self._fleets) - self._connected()

    def _ranks(self, knowledge: Knowledge) -> int:
        return sum(router.roster.knowledge()[knowledge] for _, router in self._fleets)

    def _rank_requests(self) -> Iterator[Row]:
        for member, router in self._available():
            worker_id = member.card.worker_id
            for rank in member.card.ranks:
                shares = router.load.shares(Target(worker_id, rank))
                for whose, load in zip(("own", "others"), shares, strict=True):
                    yield Row((worker_id, str(rank), whose), (load.active,))

    def _rank_load(self) -> Iterator[Row]:
        for member, _ in self._available():
            for rank in member.status.ranks if member.status else ():
                labels = (member.card.worker_id, str(rank.rank))
                yield Row(labels, (rank.running, rank.waiting, rank.kv_usage))

    def _kv_events(self) -> Iterator[Row]:
        feeds = [each for _, router in self._fleets for each in router.roster.feeds.items()]
        for worker_id, feed in feeds:
            for rank, counted in feed.statistics().items():
                yield Row(
                    (worker_id, str(rank)),
                    (
                        counted.batches,
                        counted.gaps,
                        counted.replays,
                        counted.losses,
                        sum(counted.malformed.values()),
                        counted.lag_s,
                    ),
                )


def _busy(router: Router) -> int:
    return len({target.worker_id for target in router.load.busy()})
