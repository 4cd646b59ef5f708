"""Metrics of all fleets and their routers, computed when ``/metrics`` is read."""

from collections.abc import Iterable, Iterator
from functools import partial

from common.identity import Target
from common.observability.live_metrics import Row
from common.observability.telemetry import INDEX_RANKS, KV_EVENTS, RANK_LOAD, RANK_REQUESTS, WORKERS
from frontend.router import Knowledge, Router
from frontend.workers.contract import Refusals
from frontend.workers.fleet import Fleet
from frontend.workers.members import Departures, Member


def show_workers(fleets: Iterable[Fleet], refusals: Refusals, departures: Departures) -> None:
    """Export the metrics of these fleets, replacing an earlier export."""

    def available() -> Iterator[tuple[Member, Router]]:
        return ((member, each.router) for each in fleets for member in each.members.available())

    def connected() -> int:
        return sum(1 for _ in available())

    for state, count in (
        ("connected", connected),
        ("disconnected", lambda: sum(len(each.members.shown()) for each in fleets) - connected()),
        ("refused", lambda: len(refusals.by_worker())),
        ("ejected", lambda: sum(each.router.ejection.out() for each in fleets)),
        ("busy", lambda: sum(_busy(each.router) for each in fleets)),
        ("lost", lambda: sum(not each.left for each in departures.recent())),
    ):
        WORKERS.labels(state).set_function(count)
    for knowledge in Knowledge:
        INDEX_RANKS.labels(knowledge).set_function(partial(_ranks, fleets, knowledge))
    RANK_LOAD.set_function(lambda: _rank_load(available()))
    RANK_REQUESTS.set_function(lambda: _rank_requests(available()))
    KV_EVENTS.set_function(lambda: _kv_events(each.router for each in fleets))


def _ranks(fleets: Iterable[Fleet], knowledge: Knowledge) -> int:
    return sum(each.router.roster.knowledge()[knowledge] for each in fleets)


def _rank_requests(available: Iterable[tuple[Member, Router]]) -> Iterator[Row]:
    for member, router in available:
        worker_id = member.card.worker_id
        for rank in member.card.ranks:
            shares = router.load.shares(Target(worker_id, rank))
            for whose, load in zip(("own", "others"), shares, strict=True):
                yield Row((worker_id, str(rank), whose), (load.active,))


def _rank_load(available: Iterable[tuple[Member, Router]]) -> Iterator[Row]:
    for member, _ in available:
        for rank in member.status.ranks if member.status else ():
            labels = (member.card.worker_id, str(rank.rank))
            yield Row(labels, (rank.running, rank.waiting, rank.kv_usage))


def _kv_events(routers: Iterable[Router]) -> Iterator[Row]:
    for worker_id, feed in (each for router in routers for each in router.roster.feeds.items()):
        for rank, counted in feed.statistics().items():
            malformed = sum(counted.malformed.values())
            figures = counted.batches, counted.gaps, counted.replays, counted.losses
            yield Row((worker_id, str(rank)), (*figures, malformed, counted.lag_s))


def _busy(router: Router) -> int:
    return len({target.worker_id for target in router.load.busy()})
