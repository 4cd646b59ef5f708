"""Who is refused, and why: for the status page, the metrics and whoever finds no worker."""

from collections.abc import Sequence
from typing import Final

from common.errors import CardError, NoWorkerError
from common.identity import WorkerId
from common.observability.telemetry import REFUSED_CARDS
from frontend.workers.members import Run

REASONS: Final = 3
"""Refused workers of which a user is told why: there may be thousands, of one kind."""


def nobody(reasons: Sequence[str]) -> NoWorkerError:
    """What to say if there is no worker.

    Args:
        reasons: why some are refused, a sentence each.
    """
    if not reasons:
        return NoWorkerError("no worker is available: none has registered yet, or all are gone")
    more = len(reasons) - REASONS
    said = [*reasons[:REASONS], *([f"and {more} more are refused"] if more > 0 else [])]
    return NoWorkerError("no worker is available: " + "; ".join(said))


class Refusals:
    """Why runs of workers are kept out, for as long as they are."""

    def __init__(self) -> None:
        self._reasons: dict[Run, str] = {}

    def add(self, run: Run, error: CardError) -> None:
        """A run is refused, and no longer for another reason."""
        self._reasons[run] = str(error)
        REFUSED_CARDS.labels(error.field).inc()

    def take_back(self, run: Run) -> None:
        """Nothing is held against a run any more."""
        self._reasons.pop(run, None)

    def take_back_if(self, run: Run, error: CardError) -> None:
        """This is not held against a run any more; something else may be by now."""
        if self._reasons.get(run) == str(error):
            self.take_back(run)

    def reasons(self) -> list[str]:
        """All of them, a sentence each."""
        return list(self._reasons.values())

    def by_worker(self) -> dict[WorkerId, str]:
        """Workers of which some run is refused, with the reasons."""
        reasons: dict[WorkerId, str] = {}
        for (worker_id, _), reason in self._reasons.items():
            reasons[worker_id] = "; ".join(filter(None, [reasons.get(worker_id), reason]))
        return reasons
