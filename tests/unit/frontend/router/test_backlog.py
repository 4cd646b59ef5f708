"""What waits drains with time, and first outputs put right what was reckoned wrong."""

import pytest

from common.identity import RequestId, Target, WorkerId
from frontend.router.selection.backlog import Backlog
from tests.fakes.routing import Clock

A, B = (Target(WorkerId(name), 0) for name in "ab")
ONE, TWO, THREE = (RequestId(name) for name in ("one", "two", "three"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backlog(clock: Clock) -> Backlog:
    return Backlog(clock)


def wait_ms(backlog: Backlog, clock: Clock, target: Target = A) -> float:
    return backlog.wait_ms(target, clock(), in_time=True)


def test_prompts_wait_for_those_before(backlog: Backlog, clock: Clock) -> None:
    assert wait_ms(backlog, clock) == 0
    backlog.started(ONE, A, 10, 100.0)
    backlog.started(TWO, A, 20, 200.0)
    assert wait_ms(backlog, clock) == pytest.approx(300.0)
    assert (backlog.count(A), backlog.tokens(A), backlog.count(B)) == (2, 30, 0)
    clock.now += 0.120
    assert wait_ms(backlog, clock) == pytest.approx(180.0)
    backlog.computed(ONE)
    assert wait_ms(backlog, clock) == pytest.approx(180.0)
    backlog.computed(TWO)
    assert (wait_ms(backlog, clock), backlog.count(A), backlog.tokens(A)) == (0, 0, 0)


def test_what_was_quicker_than_reckoned(backlog: Backlog, clock: Clock) -> None:
    backlog.started(ONE, A, 1, 1000.0)
    backlog.started(TWO, A, 1, 100.0)
    clock.now += 0.1
    backlog.computed(ONE)
    assert wait_ms(backlog, clock) == pytest.approx(100.0)


def test_what_is_overdue_still_counts(backlog: Backlog, clock: Clock) -> None:
    backlog.started(ONE, A, 1, 100.0)
    clock.now += 60
    assert 0 < wait_ms(backlog, clock) < 100


def test_nothing_drains_while_times_are_not_known(backlog: Backlog, clock: Clock) -> None:
    backlog.started(ONE, A, 1, 100.0)
    clock.now += 60
    assert backlog.wait_ms(A, clock(), in_time=False) == 100
    assert backlog.waits(clock(), in_time=False) == [(A, 100)]


def test_ids_that_are_unknown_or_repeated(backlog: Backlog, clock: Clock) -> None:
    backlog.computed(ONE)
    backlog.started(ONE, A, 1, 100.0)
    backlog.started(ONE, B, 1, 100.0)  # it went elsewhere
    assert (backlog.count(A), backlog.count(B)) == (0, 1)
    for _ in range(3):
        backlog.computed(ONE)
    assert (backlog.count(A), backlog.count(B)) == (0, 0)


def test_a_target_that_is_gone(backlog: Backlog, clock: Clock) -> None:
    backlog.started(ONE, A, 1, 100.0)
    backlog.drop(A)
    backlog.drop(B)
    assert wait_ms(backlog, clock) == 0
    backlog.started(TWO, A, 1, 50.0)  # a successor of that name
    backlog.computed(ONE)
    assert wait_ms(backlog, clock) == pytest.approx(50.0)
    backlog.computed(TWO)
    assert wait_ms(backlog, clock) == 0
