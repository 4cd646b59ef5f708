"""What ``/metrics`` says of workers, those of all models together: asked when somebody reads it."""

from collections.abc import Iterator

from common.observability.live_metrics import Row
from common.observability.telemetry import RANK_LOAD, WORKERS
from frontend.workers.members import Members
from frontend.workers.refusals import Refusals


class Gauges:
    """Adds up who is there. Shown are those of whoever was made last."""

    def __init__(self) -> None:
        self._members: list[Members] = []
        self._refusals: list[Refusals] = []
        WORKERS.labels("connected").set_function(self._connected)
        WORKERS.labels("disconnected").set_function(
            lambda: sum(len(each.shown()) for each in self._members) - self._connected()
        )
        WORKERS.labels("refused").set_function(
            lambda: sum(len(each.reasons()) for each in self._refusals)
        )
        RANK_LOAD.set_function(self._rank_load)

    def add(self, members: Members | None, refusals: Refusals) -> None:
        """Count these too."""
        if members is not None:
            self._members.append(members)
        self._refusals.append(refusals)

    def remove(self, members: Members, refusals: Refusals) -> None:
        """Count these no more. Unknown ones are ignored."""
        self._members = [each for each in self._members if each is not members]
        self._refusals = [each for each in self._refusals if each is not refusals]

    def _connected(self) -> int:
        return sum(1 for each in self._members for _ in each.available())

    def _rank_load(self) -> Iterator[Row]:
        """What those who serve reported last."""
        for member in (one for each in self._members for one in each.available()):
            for rank in member.status.ranks if member.status else ():
                labels = (member.card.worker_id, str(rank.rank))
                yield Row(labels, (rank.running, rank.waiting, rank.kv_usage))
