"""Circuit breaker per worker, for errors and stalls. No I/O.

A circuit opens after several failures in a row, or when the link is lost. It stays open for a time
that doubles with every relapse; jitter keeps frontends from returning all at once. Then it is
half-open: one trial request at a time. A first output closes it, a failure opens it for longer. A
worker that stayed closed for the longest time-out starts with a clean record.
"""

import random
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from common.identity import Incarnation, RequestId, WorkerId
from common.observability.fleet_events import What, note
from common.observability.telemetry import EJECTIONS

FAILURES: Final = 3
"""Consecutive failed requests that eject a worker: a single failure may be the request's own fault.
"""

JITTER = 0.2
"""Maximum deviation of a time-out in either direction, as a share."""

MAX_EJECTION_S = 60.0
"""Longest time-out, unless the first is longer: a recovered worker is soon found, and a broken one
fails a request a minute."""


class Circuit(StrEnum):
    """Closed passes requests; open passes no request; half-open passes one trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(slots=True)
class _Record:
    """Failure record: ``relapses`` counts ejections since it was clean,
    ``due`` ends the time-out.
    """

    incarnation: Incarnation
    circuit: Circuit = Circuit.CLOSED
    failures: int = 0
    relapses: int = 0
    due: float = 0.0
    came_back: float = 0.0
    reason: str = ""
    on_trial: RequestId | None = None


class Ejection:
    """Circuits of workers; a worker that never failed takes no memory. ``chance`` draws jitter."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        base_s: float = 1.0,
        chance: random.Random | None = None,
    ) -> None:
        self._clock = clock
        self._base_s = base_s
        self._max_s = max(base_s, MAX_EJECTION_S)
        self._random = chance or random.Random()
        self._records: dict[WorkerId, _Record] = {}

    def out(self) -> int:
        return sum(one.circuit is not Circuit.CLOSED for one in self._records.values())

    def failed(self, worker_id: WorkerId, incarnation: Incarnation, reason: str) -> None:
        """Count a request that failed by the worker's fault."""
        record = self._record(worker_id, incarnation)
        if record.circuit is Circuit.OPEN:
            return  # sent before the ejection, which covers its failure
        record.failures += 1
        if record.circuit is Circuit.HALF_OPEN or record.failures >= FAILURES:
            self._put_out(worker_id, record, reason)

    def eject(self, worker_id: WorkerId, incarnation: Incarnation, reason: str) -> None:
        """Open the circuit at once: the worker itself failed."""
        record = self._record(worker_id, incarnation)
        if record.circuit is not Circuit.OPEN:
            self._put_out(worker_id, record, reason)

    def succeeded(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Close the circuit of a worker that answered a request."""
        record = self._records.get(worker_id)
        if record is None or record.incarnation != incarnation:
            return
        if record.circuit is not Circuit.CLOSED:
            record.came_back = self._clock()
        record.circuit = Circuit.CLOSED
        record.failures = 0
        record.on_trial = None
        if not record.relapses:
            del self._records[worker_id]

    def routed(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """Note that a request was sent; a half-open circuit admits no other meanwhile."""
        record = self._records.get(worker_id)
        if record is not None and record.circuit is Circuit.HALF_OPEN:
            record.on_trial = request_id

    def ended(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """Note a request's end, even one that says nothing about the worker."""
        record = self._records.get(worker_id)
        if record is not None and record.on_trial == request_id:
            record.on_trial = None

    def forget(self, worker_id: WorkerId) -> None:
        self._records.pop(worker_id, None)

    def unusable(self) -> Set[WorkerId]:
        if not self._records:
            return frozenset()
        now = self._clock()
        unusable = set()
        for worker_id, record in list(self._records.items()):
            if record.circuit is Circuit.OPEN and record.due <= now:
                record.circuit = Circuit.HALF_OPEN
            if record.circuit is Circuit.OPEN or record.on_trial is not None:
                unusable.add(worker_id)
            elif record.circuit is Circuit.CLOSED and not record.failures and self._clean(record):
                del self._records[worker_id]
        return unusable

    def least_bad(self, workers: Collection[WorkerId]) -> Set[WorkerId]:
        """Return the workers with the fewest relapses: the last resort if all are unusable."""
        relapses = {
            worker_id: record.relapses if (record := self._records.get(worker_id)) else 0
            for worker_id in workers
        }
        least = min(relapses.values())
        return {worker_id for worker_id, count in relapses.items() if count == least}

    def circuit(self, worker_id: WorkerId) -> tuple[Circuit, str]:
        """Return the circuit and why it is not closed; the reason is empty if it is."""
        record = self._records.get(worker_id)
        if record is None or record.circuit is Circuit.CLOSED:
            return Circuit.CLOSED, ""
        return record.circuit, record.reason

    def remaining_s(self, worker_id: WorkerId) -> float:
        record = self._records.get(worker_id)
        is_open = record is not None and record.circuit is Circuit.OPEN
        return max(0.0, record.due - self._clock()) if record and is_open else 0.0

    def _record(self, worker_id: WorkerId, incarnation: Incarnation) -> _Record:
        record = self._records.get(worker_id)
        if record is None or record.incarnation != incarnation:
            record = self._records[worker_id] = _Record(incarnation)
        return record

    def _clean(self, record: _Record) -> bool:
        return self._clock() - record.came_back >= self._max_s

    def _put_out(self, worker_id: WorkerId, record: _Record, reason: str) -> None:
        if record.circuit is Circuit.CLOSED and self._clean(record):
            record.relapses = 0
        time_out = min(self._max_s, self._base_s * 2.0 ** min(record.relapses, 32))
        record.circuit = Circuit.OPEN
        record.due = self._clock() + time_out * self._random.uniform(1 - JITTER, 1 + JITTER)
        record.relapses += 1
        record.failures = 0
        record.reason = reason
        record.on_trial = None
        EJECTIONS.labels(worker_id, reason).inc()
        note(What.EJECTED, worker_id, reason)
