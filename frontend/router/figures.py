"""What ``/metrics`` says of routers, all of this process together: asked when somebody reads it."""

from collections import ChainMap
from functools import partial

from common.observability.telemetry import BUSY_WORKERS, EJECTED_WORKERS, INDEX_RANKS
from frontend.router.events import show_figures
from frontend.router.index import Knowledge
from frontend.router.roster import Roster
from frontend.router.selection import Ejection


class Figures:
    """Adds up what routers count. Shown are those of whoever was made last."""

    def __init__(self) -> None:
        self._routers: list[tuple[Roster, Ejection]] = []
        for knowledge in Knowledge:
            INDEX_RANKS.labels(knowledge).set_function(partial(self._ranks, knowledge))
        EJECTED_WORKERS.set_function(lambda: sum(one.out() for _, one in self._routers))
        BUSY_WORKERS.set_function(lambda: sum(map(_busy, self._routers)))

    def add(self, roster: Roster, ejection: Ejection) -> None:
        """Count what these know too."""
        self._routers.append((roster, ejection))
        self._show_events()

    def remove(self, roster: Roster) -> None:
        """Count it no more. Unknown ones are ignored."""
        self._routers = [each for each in self._routers if each[0] is not roster]
        self._show_events()

    def _show_events(self) -> None:
        show_figures(ChainMap(*(roster.feeds for roster, _ in self._routers)))

    def _ranks(self, knowledge: Knowledge) -> int:
        return sum(roster.knowledge()[knowledge] for roster, _ in self._routers)


def _busy(router: tuple[Roster, Ejection]) -> int:
    return len({target.worker_id for target in router[0].load.busy()})
