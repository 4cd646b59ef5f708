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
        """Give this run nothing more, also if it is lost for a while, or not there yet."""
        self._runs[worker_id] = incarnation

    def remove(self, worker_id: WorkerId) -> None:
        """Let a worker serve, or forget one that is gone for good. Unknown ids are ignored."""
        self._runs.pop(worker_id, None)

    def has(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Whether this run is drained."""
        return self._runs.get(worker_id) == incarnation

    def runs(self) -> dict[WorkerId, Incarnation]:
        """All of them, those included that are not there now."""
        return dict(self._runs)

    def unusable(self) -> set[WorkerId]:
        """Those of them that are there."""
        there = set()
        for worker_id in list(self._runs):
            worker = self._workers.get(worker_id)
            if worker is None:
                continue
            if self.has(worker_id, worker.incarnation):
                there.add(worker_id)
            else:  # another run has the name now
                self.remove(worker_id)
        return there
