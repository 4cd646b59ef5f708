"""Workers that say that they are paused or asleep: they get no request until they serve. No I/O."""

from common.identity import WorkerId
from common.request_plane.operations import Condition


class Resting:
    """What workers said last of whether they take requests."""

    def __init__(self) -> None:
        self._resting: dict[WorkerId, Condition] = {}

    def reported(self, worker_id: WorkerId, condition: Condition) -> None:
        """Take a worker's word."""
        if condition is Condition.SERVING:
            self._resting.pop(worker_id, None)
        else:
            self._resting[worker_id] = condition

    def forget(self, worker_id: WorkerId) -> None:
        """It is gone. Unknown ids are ignored."""
        self._resting.pop(worker_id, None)

    def unusable(self) -> set[WorkerId]:
        """All of them."""
        return set(self._resting)
