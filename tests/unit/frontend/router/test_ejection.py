"""Workers are put out, tried and let in again, by a clock of our own."""

import random

import pytest

from common.identity import Incarnation, RequestId, WorkerId
from frontend.router.ejection import JITTER, Circuit, Ejection

A, B = WorkerId("a"), WorkerId("b")
RUN = Incarnation("1")
R, S = RequestId("r"), RequestId("s")
MAX_S = 60.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ejection(clock: Clock) -> Ejection:
    return Ejection(clock, base_s=1.0, chance=random.Random(1))


def fail(ejection: Ejection, worker_id: WorkerId = A, times: int = 3) -> None:
    for _ in range(times):
        ejection.failed(worker_id, RUN, "engine failed")


def circuit(ejection: Ejection, worker_id: WorkerId = A) -> Circuit:
    return ejection.circuit(worker_id)[0]


def time_out(ejection: Ejection, clock: Clock) -> float:
    """Let time pass until a worker that is out is on trial; says how long that took."""
    started = clock.now
    while A in ejection.unusable():
        clock.now += 0.01
        assert clock.now < started + 2 * MAX_S
    assert circuit(ejection) is Circuit.HALF_OPEN
    return clock.now - started


def test_a_late_answer_of_an_earlier_run_closes_no_circuit(ejection: Ejection) -> None:
    fail(ejection)
    ejection.succeeded(A, Incarnation("earlier"))
    assert circuit(ejection) is Circuit.OPEN


def test_only_failures_in_a_row_put_a_worker_out(ejection: Ejection) -> None:
    fail(ejection, times=2)
    ejection.succeeded(A, RUN)
    fail(ejection, times=2)
    assert ejection.unusable() == set()
    fail(ejection, times=1)
    assert ejection.unusable() == {A}
    assert ejection.circuit(A) == (Circuit.OPEN, "engine failed")
    assert circuit(ejection, B) is Circuit.CLOSED


def test_what_befalls_the_worker_itself_puts_it_out_at_once(ejection: Ejection) -> None:
    assert ejection.remaining_s(A) == 0
    ejection.eject(A, RUN, "link_lost")
    assert ejection.circuit(A) == (Circuit.OPEN, "link_lost")


def test_how_long_it_stays_out_is_known(ejection: Ejection, clock: Clock) -> None:
    fail(ejection)
    due = ejection.remaining_s(A)
    assert due == pytest.approx(1, rel=JITTER)
    clock.now += due / 2
    assert ejection.remaining_s(A) == pytest.approx(due / 2)
    clock.now += due  # nobody has looked since
    assert ejection.remaining_s(A) == 0
    time_out(ejection, clock)
    assert ejection.remaining_s(A) == 0


def test_a_trial_is_one_request_and_its_first_output_ends_it(
    ejection: Ejection, clock: Clock
) -> None:
    fail(ejection)
    time_out(ejection, clock)
    ejection.routed(A, R)
    assert ejection.unusable() == {A}
    ejection.succeeded(A, RUN)
    assert ejection.unusable() == set()
    assert circuit(ejection) is Circuit.CLOSED


def test_a_trial_that_tells_nothing_makes_room_for_another(
    ejection: Ejection, clock: Clock
) -> None:
    fail(ejection)
    time_out(ejection, clock)
    ejection.routed(A, R)
    ejection.ended(A, S)
    assert ejection.unusable() == {A}
    ejection.ended(A, R)
    assert ejection.unusable() == set()
    assert circuit(ejection) is Circuit.HALF_OPEN


def test_times_out_double_up_to_a_limit_with_jitter(ejection: Ejection, clock: Clock) -> None:
    fail(ejection)
    for expected in (1, 2, 4, 8, 16, 32, 60, 60):
        assert time_out(ejection, clock) == pytest.approx(expected, rel=JITTER, abs=0.02)
        ejection.routed(A, R)
        fail(ejection, times=1)  # on trial one is enough
    assert circuit(ejection) is Circuit.OPEN


def test_failures_of_requests_sent_before_do_not_make_it_worse(
    ejection: Ejection, clock: Clock
) -> None:
    fail(ejection, times=50)
    ejection.eject(A, RUN, "link_lost")
    assert time_out(ejection, clock) == pytest.approx(1, rel=JITTER, abs=0.02)


def test_a_relapse_counts_until_the_worker_was_good_for_long(
    ejection: Ejection, clock: Clock
) -> None:
    fail(ejection)
    time_out(ejection, clock)
    ejection.succeeded(A, RUN)
    clock.now += MAX_S / 2
    fail(ejection)
    assert time_out(ejection, clock) == pytest.approx(2, rel=JITTER, abs=0.02)
    ejection.succeeded(A, RUN)
    clock.now += MAX_S
    fail(ejection)
    assert time_out(ejection, clock) == pytest.approx(1, rel=JITTER, abs=0.02)


def test_the_least_bad_relapsed_least_often(ejection: Ejection, clock: Clock) -> None:
    fail(ejection, A)
    time_out(ejection, clock)
    fail(ejection, A, times=1)
    fail(ejection, B)
    assert ejection.least_bad({A, B}) == {B}
    assert ejection.least_bad({A}) == {A}


def test_a_success_while_out_brings_it_back(ejection: Ejection) -> None:
    """It was the least bad, and turned out to work."""
    fail(ejection)
    ejection.succeeded(A, RUN)
    assert circuit(ejection) is Circuit.CLOSED


def test_another_incarnation_starts_with_a_clean_record(ejection: Ejection) -> None:
    fail(ejection)
    ejection.failed(A, Incarnation("2"), "engine failed")
    assert circuit(ejection) is Circuit.CLOSED
    ejection.eject(A, Incarnation("2"), "link_lost")
    ejection.forget(A)
    assert circuit(ejection) is Circuit.CLOSED and ejection.unusable() == set()
