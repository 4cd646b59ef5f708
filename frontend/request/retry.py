"""Decide which failures of workers are retried, and how often.

One request gets a limited number of retries, and all together a budget: a dying worker takes many
requests along, so retries stay a fraction of recent requests. The budget refills within seconds,
and requests beyond it wait. An engine's death allows one retry at most, and none if the client made
tensors itself: such a request must not go round the fleet.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from common.errors import (
    DeadlineExceededError,
    EngineFailedError,
    EngineGoneError,
    EnginesDiedError,
    MediaUnavailableError,
    MmRouterError,
    ProtocolError,
    RequestRejectedError,
    RetryBudgetError,
    WorkerBusyError,
    WorkerLostError,
    causes,
)
from common.identity import WorkerId
from common.observability.telemetry import RETRY_BUDGET_EXHAUSTED
from common.request_plane.protocol import Failed, FailureKind

logger = logging.getLogger(__name__)

DEADLY = 2
"""Engine deaths at one place of an answer that end a request. One death may be chance: a dying
engine takes all its requests along."""

DEADLY_TENSORS = 1
"""The same for a request with tensors made by its client, the likeliest cause."""

FURTHER = 24
"""Tokens past the place of an engine's death that acquit a request of it. Fewer may only be late:
outputs are gathered on their way, and the last ones are lost with a worker."""

RECENT_S = 30.0
"""Time constant of what counts as recent, in seconds: after it, 37 % of a request still counts."""

FRACTION = 0.5
"""Retries for each recent request; more could overload the fleet."""

FLOOR = 10.0
"""Retries that are allowed without any other recent request."""

BUSY_S = 1.0
"""Seconds that a request avoids a worker that refused it as busy or paused: unlike a failed one, it
may take the request soon."""

MAX_MESSAGE_LEN: Final = 16_384
"""Characters of a worker's message that a client and the log get."""


class RetryBudget:
    """Leaky account of recent requests and recent retries."""

    def __init__(
        self, fraction: float = FRACTION, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fraction = fraction
        self._clock = clock
        self._requests = 0.0
        self._retries = 0.0
        self._as_of = clock()

    def request(self) -> None:
        """Count a request."""
        self._leak()
        self._requests += 1

    def take(self) -> float:
        """Take a retry. Return 0, or the seconds until there is one if nothing else happens."""
        self._leak()
        excess = self._retries - self._fraction * self._requests
        if excess > FLOOR - 1:
            return RECENT_S * math.log(excess / (FLOOR - 1))
        self._retries += 1
        return 0.0

    def _leak(self) -> None:
        now = self._clock()
        kept = math.exp((self._as_of - now) / RECENT_S)
        self._requests *= kept
        self._retries *= kept
        self._as_of = now


class _Tried(NamedTuple):
    """A failed try: when the worker got the request, and until when it is avoided."""

    given: float
    until: float


class _TurnedAway(NamedTuple):
    """Since when workers were too busy for a request, and how far its answer was by then."""

    since: float
    place: int


class Attempts:
    """The workers that one request was given to; ``count`` is that of failures."""

    def __init__(
        self,
        limit: int,
        budget: RetryBudget,
        clock: Callable[[], float] = time.monotonic,
        *,
        worker_wait_s: float = 0.0,
        deadly: int = DEADLY,
    ) -> None:
        """Limit the tries of one request.

        Args:
            limit: retries at most.
            worker_wait_s: how long it waits for a worker, also by retrying workers that are busy or
                paused. Such retries do not count for so long, unless ``limit`` is 0.
            deadly: engine deaths at one place of its answer that end it.
        """
        self._limit = limit
        self._deadly = deadly
        self._worker_wait_s = worker_wait_s
        self._budget = budget
        self._clock = clock
        self._last: MmRouterError | None = None
        self._owes = False
        self._waits = False
        self._deaths = 0
        self._died_at = 0
        self._given = clock()
        self._counted = 0
        self._turned_away: _TurnedAway | None = None
        self._tried: dict[WorkerId, _Tried] = {}
        self.count = 0
        budget.request()

    def failed(self, worker_id: WorkerId, error: MmRouterError, *, place: int = 0) -> None:
        """Return if another worker may try, once the budget allows it.

        Args:
            place: tokens of the answer so far, from this worker and in the prompt that it got.

        Raises:
            EnginesDiedError: the request may be the cause of the engines' deaths.
            MmRouterError: the error itself, if a retry is useless or beyond the limit.
        """
        busy = isinstance(error, WorkerBusyError)
        until = self._clock() + BUSY_S if busy else math.inf
        self._tried[worker_id] = _Tried(self._given, until)
        self.count += 1
        self._turn_away(place if busy else None)
        if not (busy and self._limit and self.patience_s()):
            self._counted += 1
        if not error.retryable or self._counted > self._limit:
            raise error
        if error.may_be_deadly:
            acquitted = place >= self._died_at + FURTHER
            self._deaths = 1 if acquitted else self._deaths + 1
            self._died_at = place
            if self._deaths == self._deadly:
                raise EnginesDiedError(error, self._deadly) from error
        self._last = _without_traces(error)
        self._owes = True

    def patience_s(self) -> float:
        """Return the seconds that the request may still wait for a worker."""
        if (turned_away := self._turned_away) is None:
            return self._worker_wait_s
        return max(0.0, self._worker_wait_s - (self._clock() - turned_away.since))

    def _turn_away(self, place: int | None) -> None:
        """Restart the wait if the answer has progressed since; None ends it."""
        before = self._turned_away
        if place is None:
            self._turned_away = None
        elif before is None or place > before.place:
            self._turned_away = _TurnedAway(self._clock(), place)

    def pay(self) -> None:
        """Take the cost of a try from the budget, just before a worker gets the request.

        The first try is free. RetryBudgetError says how long to wait, and is counted once a try.
        """
        self._given = self._clock()
        if self._last is None or not self._owes:
            return
        wait_s = self._budget.take()
        if wait_s:
            if not self._waits:
                RETRY_BUDGET_EXHAUSTED.inc()
                logger.warning("retry budget exhausted; delaying a retry after: %s", self._last)
            self._waits = True
            raise RetryBudgetError(self._last, wait_s)
        self._owes = self._waits = False

    def failed_on(self, joined_since: Callable[[WorkerId, float], bool]) -> set[WorkerId]:
        """Return the workers to avoid now; one that has joined since its failure is another one."""
        now = self._clock()
        return {
            worker_id
            for worker_id, tried in self._tried.items()
            if now < tried.until and not joined_since(worker_id, tried.given)
        }

    def take_failure(self) -> MmRouterError | None:
        """Return the last failure, to be raised, without keeping it any longer."""
        last, self._last = self._last, None
        return last


def _without_traces(error: MmRouterError) -> MmRouterError:
    """Drop tracebacks: their frames would keep the request and its media in a reference cycle."""
    for each in causes(error):
        each.__traceback__ = None
    return error


_FAILURES: Final[Mapping[FailureKind, type[MmRouterError]]] = {
    FailureKind.BUSY: WorkerBusyError,
    FailureKind.MEDIA: MediaUnavailableError,
    FailureKind.ENGINE_DEAD: EngineGoneError,
    FailureKind.ENGINE: EngineFailedError,
    FailureKind.ABORTED: WorkerLostError,
    FailureKind.LATE: DeadlineExceededError,
    FailureKind.PROTOCOL: ProtocolError,
}


def failure(worker_id: WorkerId, failed: Failed) -> MmRouterError:
    """Return the error of a failed request; its type tells whether another worker may succeed."""
    said = failed.message[:MAX_MESSAGE_LEN]
    if failed.kind is FailureKind.INVALID:
        return RequestRejectedError(said)
    return _FAILURES[failed.kind](f"worker {worker_id}: {said}")
