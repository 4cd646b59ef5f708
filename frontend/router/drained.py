"""Workers that an operator drains: they get no request until they are reinstated. No I/O.

What they have they finish. It is a run of a worker that is drained: one that is started again
under the same name serves.
"""

from collections.abc import Mapping

from common.identity import Incarnation, WorkerId
from frontend.router.worker import RoutableWorker


class Drained:
    """The runs of workers that are drained.

    Args:
        workers: who is there, a live view.
    """

    def __init__(self, workers: Mapping[WorkerId, RoutableWorker]) -> None:
        self._workers = workers
        self._runs: dict[WorkerId, Incarnation] = {}

    def add(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Give this run nothing more, also if it is lost for a while."""
        # Those that are gone for good, so that restarts don't add up.
        for one in [one for one in self._runs if one not in self._workers]:
            del self._runs[one]
        self._runs[worker_id] = incarnation

    def remove(self, worker_id: WorkerId) -> None:
        """Let a worker serve again. Unknown ids are ignored."""
        self._runs.pop(worker_id, None)

    def runs(self) -> dict[WorkerId, Incarnation]:
        """All of them, those included that are not there now."""
        return dict(self._runs)

    def unusable(self) -> set[WorkerId]:
        """Those of them that are there."""
        return {
            worker_id
            for worker_id, incarnation in self._runs.items()
            if (worker := self._workers.get(worker_id)) and worker.incarnation == incarnation
        }
