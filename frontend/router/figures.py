"""Metrics of all routers of this process, computed when ``/metrics`` is read."""

from collections.abc import Iterator
from functools import partial

from common.observability.live_metrics import Row
from common.observability.telemetry import BUSY_WORKERS, EJECTED_WORKERS, INDEX_RANKS, KV_EVENTS
from frontend.router.availability import Ejection
from frontend.router.index import Knowledge
from frontend.router.roster import Roster


class Figures:
    """Aggregate the metrics of routers. Only the newest instance is exported."""

    def __init__(self) -> None:
        self._routers: list[tuple[Roster, Ejection]] = []
        for knowledge in Knowledge:
            INDEX_RANKS.labels(knowledge).set_function(partial(self._ranks, knowledge))
        EJECTED_WORKERS.set_function(lambda: sum(one.out() for _, one in self._routers))
        BUSY_WORKERS.set_function(lambda: sum(map(_busy, self._routers)))
        KV_EVENTS.set_function(self._kv_events)

    def add(self, roster: Roster, ejection: Ejection) -> None:
        """Include another router."""
        self._routers.append((roster, ejection))

    def remove(self, roster: Roster) -> None:
        """Exclude a router. Unknown ones are ignored."""
        self._routers = [each for each in self._routers if each[0] is not roster]

    def _kv_events(self) -> Iterator[Row]:
        feeds = [one for roster, _ in self._routers for one in list(roster.feeds.items())]
        for worker_id, feed in feeds:
            for rank, counted in feed.statistics().items():
                yield Row(
                    (worker_id, str(rank)),
                    (
                        counted.batches,
                        counted.gaps,
                        counted.replays,
                        counted.losses,
                        counted.restarts,
                        sum(counted.malformed.values()),
                        counted.lag_s,
                    ),
                )

    def _ranks(self, knowledge: Knowledge) -> int:
        return sum(roster.knowledge()[knowledge] for roster, _ in self._routers)


def _busy(router: tuple[Roster, Ejection]) -> int:
    return len({target.worker_id for target in router[0].load.busy()})
