"""Arithmetic of the retry budget, and the attempts of one request."""

import pytest
from prometheus_client import REGISTRY

from common.errors import (
    EngineFailedError,
    EngineGoneError,
    EnginesDiedError,
    RetryBudgetError,
    WorkerBusyError,
    WorkerLostError,
)
from common.identity import WorkerId
from frontend.request.retry import (
    BUSY_S,
    DEADLY,
    DEADLY_TENSORS,
    FLOOR,
    RECENT_S,
    Attempts,
    RetryBudget,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def exhausted() -> float:
    return REGISTRY.get_sample_value("mmrouter_retry_budget_exhausted_total") or 0.0


def takes(budget: RetryBudget) -> int:
    count = 0
    while budget.take() == 0:
        count += 1
    return count


def test_a_few_retries_are_always_allowed() -> None:
    assert takes(RetryBudget(0.5, Clock())) == FLOOR
    assert takes(RetryBudget(0.0, Clock())) == FLOOR


def test_retries_are_a_fraction_of_the_requests() -> None:
    budget = RetryBudget(0.25, Clock())
    for _ in range(400):
        budget.request()
    assert takes(budget) == 100 + FLOOR


def test_old_requests_and_old_retries_are_forgotten() -> None:
    clock = Clock()
    budget = RetryBudget(0.5, clock)
    for _ in range(1000):
        budget.request()
    assert takes(budget) == 500 + FLOOR
    clock.now += RECENT_S
    assert takes(budget) == int((1 - 1 / 2.718281828) * FLOOR), "both shrank alike"
    clock.now += 100 * RECENT_S
    assert takes(budget) == FLOOR


def test_retries_stay_a_fraction_when_everything_fails() -> None:
    """Each request fails wherever it goes, for ten minutes."""
    clock = Clock()
    budget = RetryBudget(0.2, clock)
    retries = 0
    for _ in range(6000):
        clock.now += 0.1
        attempts = Attempts(3, budget)
        try:
            for n in range(10):
                attempts.failed(WorkerId(f"w{n}"), WorkerLostError("gone"))
                attempts.pay()
                retries += 1
        except (RetryBudgetError, WorkerLostError):
            pass
    assert 0.15 * 6000 < retries < 0.2 * 6000 + FLOOR * 6000 * 0.1 / RECENT_S + FLOOR


def test_one_request_is_tried_as_often_as_the_limit_says() -> None:
    attempts = Attempts(2, RetryBudget(1.0))
    attempts.failed(WorkerId("a"), WorkerLostError("gone"))
    attempts.failed(WorkerId("b"), WorkerLostError("gone too"))
    assert attempts.failed_on(lambda *_: False) == {"a", "b"} and attempts.count == 2
    with pytest.raises(WorkerLostError, match="gone again"):
        attempts.failed(WorkerId("c"), WorkerLostError("gone again"))


def test_a_worker_that_was_busy_is_left_alone_for_a_while_only() -> None:
    clock = Clock()
    attempts = Attempts(3, RetryBudget(1.0), clock)
    attempts.failed(WorkerId("busy"), WorkerBusyError("it is paused"))
    attempts.failed(WorkerId("lost"), WorkerLostError("gone"))
    assert attempts.failed_on(lambda *_: False) == {"busy", "lost"}
    clock.now += BUSY_S
    assert attempts.failed_on(lambda *_: False) == {"lost"}
    attempts.failed(WorkerId("busy"), WorkerBusyError("still"))
    assert attempts.failed_on(lambda *_: False) == {"busy", "lost"}


def test_a_busy_worker_is_tried_for_as_long_as_a_request_waits_for_one() -> None:
    clock = Clock()
    attempts = Attempts(2, RetryBudget(1.0), clock, worker_wait_s=60.0)
    for _ in range(60):
        assert attempts.patience_s() > 0
        attempts.failed(WorkerId("a"), WorkerBusyError("too much to do"))
        clock.now += BUSY_S
    assert attempts.patience_s() == 0
    for _ in range(2):  # as any other failure, from now on
        attempts.failed(WorkerId("a"), WorkerBusyError("too much to do"))
    with pytest.raises(WorkerBusyError):
        attempts.failed(WorkerId("a"), WorkerBusyError("too much to do"))


def test_the_wait_for_a_busy_worker_begins_anew_with_an_answer_and_with_another_failure() -> None:
    clock = Clock()
    attempts = Attempts(2, RetryBudget(1.0), clock, worker_wait_s=60.0)
    for place, patience in ((0, 60.0), (0, 19.0), (5, 60.0), (5, 19.0), (5, 0.0)):
        attempts.failed(WorkerId("a"), WorkerBusyError("it is paused"), place=place)
        assert attempts.patience_s() == patience
        clock.now += 41.0
    attempts.failed(WorkerId("a"), WorkerLostError("gone"))
    assert attempts.patience_s() == 60.0


def test_without_a_wait_or_a_limit_a_busy_worker_counts_as_any_other() -> None:
    attempts = Attempts(2, RetryBudget(1.0))
    attempts.failed(WorkerId("a"), WorkerBusyError("busy"))
    attempts.failed(WorkerId("b"), WorkerBusyError("busy"))
    with pytest.raises(WorkerBusyError):
        attempts.failed(WorkerId("c"), WorkerBusyError("busy"))
    with pytest.raises(WorkerBusyError):
        Attempts(0, RetryBudget(1.0), worker_wait_s=60.0).failed(
            WorkerId("a"), WorkerBusyError("busy")
        )


def test_who_joined_after_it_was_given_the_request_is_another_one() -> None:
    clock = Clock()
    attempts = Attempts(3, RetryBudget(1.0), clock)
    clock.now += 1
    attempts.pay()
    attempts.failed(WorkerId("a"), WorkerLostError("gone"))
    joined = clock.now - 0.5
    assert attempts.failed_on(lambda _, since: joined > since) == {"a"}
    joined = clock.now + 0.5
    assert attempts.failed_on(lambda _, since: joined > since) == set()


@pytest.mark.parametrize("deadly", [DEADLY_TENSORS, DEADLY])
def test_so_many_engines_may_die_of_a_request(deadly: int) -> None:
    attempts = Attempts(9, RetryBudget(0.5, Clock()), deadly=deadly)
    for number in range(deadly - 1):
        attempts.failed(WorkerId(f"w{number}"), EngineGoneError("it died"))
    with pytest.raises(EnginesDiedError, match=f"engine number {deadly} that died"):
        attempts.failed(WorkerId("last"), EngineGoneError("it died"))


def test_no_limit_means_no_retry() -> None:
    with pytest.raises(WorkerLostError):
        Attempts(0, RetryBudget(1.0)).failed(WorkerId("a"), WorkerLostError("gone"))


def test_a_kept_failure_keeps_nothing_else() -> None:
    attempts = Attempts(2, RetryBudget(1.0))
    try:
        try:
            raise KeyError
        except KeyError as cause:
            raise WorkerLostError("gone") from cause
    except WorkerLostError as error:
        attempts.failed(WorkerId("a"), error)
    last = attempts.take_failure()
    assert isinstance(last, WorkerLostError) and last.__traceback__ is None
    assert last.__cause__ is not None and last.__cause__.__traceback__ is None
    assert attempts.take_failure() is None


def test_what_would_fail_again_is_not_tried_again() -> None:
    with pytest.raises(EngineFailedError):
        Attempts(3, RetryBudget(1.0)).failed(WorkerId("a"), EngineFailedError("broken"))


def test_an_exhausted_budget_names_the_failure_too() -> None:
    budget = RetryBudget(0.0, Clock())
    takes(budget)
    attempts = Attempts(3, budget)
    attempts.failed(WorkerId("w0"), WorkerLostError("w0 burnt down"))
    with pytest.raises(RetryBudgetError, match="w0 burnt down; it was not tried again") as caught:
        attempts.pay()
    assert caught.value.status == 503


def test_an_exhausted_budget_says_when_it_has_one_again() -> None:
    clock = Clock()
    budget = RetryBudget(0.5, clock)
    for _ in range(100):
        budget.request()
    takes(budget)
    for _ in range(20):
        wait_s = budget.take()
        assert 0 < wait_s < RECENT_S
        clock.now += wait_s * 0.99
        assert budget.take() > 0
        clock.now += wait_s * 0.011
        assert budget.take() == 0


def test_each_try_is_paid_and_counted_once() -> None:
    clock = Clock()
    budget = RetryBudget(0.0, clock)
    attempts = Attempts(3, budget)
    attempts.pay()  # the first try is free
    assert takes(budget) == FLOOR
    clock.now += 1000 * RECENT_S
    takes(budget)
    before = exhausted()
    attempts.failed(WorkerId("a"), WorkerLostError("gone"))
    for _ in range(3):
        with pytest.raises(RetryBudgetError):
            attempts.pay()
    clock.now += 1000 * RECENT_S
    attempts.pay()
    attempts.pay()
    assert takes(budget) == FLOOR - 1
    attempts.failed(WorkerId("b"), WorkerLostError("gone"))
    with pytest.raises(RetryBudgetError):
        attempts.pay()
    assert exhausted() == before + 2
