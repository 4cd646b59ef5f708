"""Workers that get no request: an operator drains them, or they are paused or asleep. No I/O."""

from collections.abc import Mapping

from common.identity import Incarnation, WorkerId
from common.request_plane.operations import Condition
from frontend.router.worker import RoutableWorker


class Drained:
    """The runs of workers that are drained, which finish what they have. A later run serves.

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


class Resting:
    """Workers that say that they are paused or asleep."""

    def __init__(self) -> None:
        self._resting: set[WorkerId] = set()

    def reported(self, worker_id: WorkerId, condition: Condition) -> None:
        """Take a worker's word."""
        if condition is Condition.SERVING:
            self._resting.discard(worker_id)
        else:
            self._resting.add(worker_id)

    def forget(self, worker_id: WorkerId) -> None:
        """Forget a worker. Unknown ids are ignored."""
        self._resting.discard(worker_id)

    def unusable(self) -> set[WorkerId]:
        """Return all of them."""
        return self._resting
