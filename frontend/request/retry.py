"""Which failures of workers let a request try again, and how often.

One request is given to another worker a limited number of times. All requests
together share a budget: a worker that dies takes many requests with it, so retries stay a
fraction of the recent requests, whatever happens. It fills again within seconds, so those
beyond it need not end: they wait. A request that engines die of must not go round the fleet:
one on which an engine died is given to one other worker at most, and to none if its client made
tensors itself.
"""

import logging
import math
import time
from collections.abc import Callable
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
"""So many engines that died at one place of an answer are no chance. Once is: an engine that
dies takes along whatever it was given."""

DEADLY_TENSORS = 1
"""The same of a request whose tensors its client made, which is the likeliest cause."""

FURTHER = 24
"""So many tokens past the place where an engine died acquit a request of that death. Fewer may
only be late: outputs are gathered on their way, and the last ones are lost with a worker."""

RECENT_S = 30.0
"""Time constant of what counts as recent: after it, 37 % of a request still counts."""

FRACTION = 0.5
"""Retries for each recent request: with more of them, retries could become the overload."""

FLOOR = 10.0
"""Retries that are allowed even if there were no other requests lately."""

BUSY_S = 1.0
"""For so long a request leaves a worker alone that refused it for what it had to do, or because it
was paused: unlike one that failed, it may take the request soon."""

LONGEST_MESSAGE: Final = 16_384
"""Characters that a client and the log get of what a worker says."""


class RetryBudget:
    """A leaky account of recent requests and recent retries."""

    def __init__(
        self, fraction: float = FRACTION, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            fraction: retries per request.
            clock: monotonic seconds.
        """
        self._fraction = fraction
        self._clock = clock
        self._requests = 0.0
        self._retries = 0.0
        self._as_of = clock()

    def request(self) -> None:
        """A request came."""
        self._leak()
        self._requests += 1

    def take(self) -> float:
        """Take one retry, if there is one.

        Returns:
            0 if it was taken, else the seconds until there is one if nothing happens.
        """
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
    """A try that failed: when the worker was given the request, and until when it is left alone."""

    given: float
    until: float


class _TurnedAway(NamedTuple):
    """Since when workers were too busy for a request, and how far its answer was by then."""

    since: float
    place: int


class Attempts:
    """The workers that one request was given to.

    Attributes:
        count: how often one failed.
    """

    def __init__(
        self,
        limit: int,
        budget: RetryBudget,
        clock: Callable[[], float] = time.monotonic,
        *,
        worker_wait_s: float = 0.0,
        deadly: int = DEADLY,
    ) -> None:
        """
        Args:
            limit: how often it may be given to another one.
            clock: monotonic seconds.
            worker_wait_s: how long it waits for one, also by being given again to those that
                refused it as busy or paused: such tries do not count for so long, unless it may
                be given to nobody again.
            deadly: after so many engines that died at one place of its answer it ends.
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
            place: how many tokens of the answer there were by then, from this worker and
                in the prompt that it got.

        Raises:
            EnginesDiedError: the request may be what engines die of.
            MmRouterError: the error itself, since another try would fail as well, or
                there were enough.
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
        """For how many seconds from now on it may wait for a worker."""
        if (turned_away := self._turned_away) is None:
            return self._worker_wait_s
        return max(0.0, self._worker_wait_s - (self._clock() - turned_away.since))

    def _turn_away(self, place: int | None) -> None:
        """The time begins anew with whatever came of the answer in between, and ends for None."""
        before = self._turned_away
        if place is None:
            self._turned_away = None
        elif before is None or place > before.place:
            self._turned_away = _TurnedAway(self._clock(), place)

    def pay(self) -> None:
        """Take what another try costs from the budget. The first is free. A worker is given
        the request right after this.

        Raises:
            RetryBudgetError: too many requests were tried again lately. Says how long
                to wait, and is counted once a try.
        """
        self._given = self._clock()
        if self._last is None or not self._owes:
            return
        wait_s = self._budget.take()
        if wait_s:
            if not self._waits:
                RETRY_BUDGET_EXHAUSTED.inc()
                logger.warning("too many requests were tried again, so one waits: %s", self._last)
            self._waits = True
            raise RetryBudgetError(self._last, wait_s)
        self._owes = self._waits = False

    def failed_on(self, joined_since: Callable[[WorkerId, float], bool]) -> set[WorkerId]:
        """Workers that are not to be given the request now.

        Args:
            joined_since: whether a worker joined after a moment, monotonic seconds: what did
                so under the name of one that failed is another one.
        """
        now = self._clock()
        return {
            worker_id
            for worker_id, tried in self._tried.items()
            if now < tried.until and not joined_since(worker_id, tried.given)
        }

    def take_failure(self) -> MmRouterError | None:
        """Why the last one failed; to be raised, so it is not kept any longer."""
        last, self._last = self._last, None
        return last


def _without_traces(error: MmRouterError) -> MmRouterError:
    """A traceback has the frames of the request in it: whoever keeps it keeps the request
    in a circle, and memory that its media are in."""
    for each in causes(error):
        each.__traceback__ = None
    return error


def failure(worker_id: WorkerId, failed: Failed) -> MmRouterError:
    """The error of a failed request, which says whether another worker may succeed."""
    said = failed.message[:LONGEST_MESSAGE]
    message = f"worker {worker_id}: {said}"
    match failed.kind:
        case FailureKind.INVALID:
            return RequestRejectedError(said)
        case FailureKind.BUSY:
            return WorkerBusyError(message)
        case FailureKind.MEDIA:
            return MediaUnavailableError(message)
        case FailureKind.ENGINE_DEAD:
            return EngineGoneError(message)
        case FailureKind.ENGINE:
            return EngineFailedError(message)
        case FailureKind.ABORTED:
            return WorkerLostError(message)
        case FailureKind.LATE:
            return DeadlineExceededError(message)
        case FailureKind.PROTOCOL:
            return ProtocolError(message)
