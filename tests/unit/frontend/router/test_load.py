"""Load: our own requests exactly, those of others from reports."""

from typing import Any

import pytest

from common.identity import RequestId, Target, WorkerId
from frontend.router.selection.load import BusyThresholds, LoadTracker, Slots, TargetLoad
from tests.fakes.reports import rank_report

W, V = WorkerId("w"), WorkerId("v")
T0, T1 = Target(W, 0), Target(W, 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def load(clock: Clock) -> LoadTracker:
    tracker = LoadTracker(clock, report_ttl_s=10.0)
    tracker.add(W, (T0,), kv_tokens=1000)
    return tracker


def report(load: LoadTracker, **others: Any) -> None:
    load.reported(W, [rank_report(**others)])


def test_the_life_of_a_request(load: LoadTracker) -> None:
    request = RequestId("r")
    load.started(request, T0, prefill_tokens=30, prompt_tokens=100)
    assert load.load(T0) == TargetLoad(1, 0, 30, 0)
    load.first_token(request)
    load.first_token(request)
    assert load.load(T0) == TargetLoad(1, 0, 0, 100)
    load.finished(request)
    load.finished(request)
    load.first_token(request)
    assert load.load(T0) == TargetLoad(0, 0, 0, 0)


def test_a_request_that_ends_in_prefill(load: LoadTracker) -> None:
    load.started(RequestId("r"), T0, 30, 100)
    load.finished(RequestId("r"))
    assert load.load(T0) == TargetLoad(0, 0, 0, 0)


def test_a_request_that_starts_again_counts_once(load: LoadTracker) -> None:
    load.started(RequestId("r"), T0, 30, 100)
    load.started(RequestId("r"), T0, 20, 100)
    assert load.load(T0) == TargetLoad(1, 0, 20, 0)


def test_what_others_have_is_added_to_our_own(load: LoadTracker) -> None:
    report(load, active=2, prefill_tokens=50, decode_tokens=70)
    assert load.load(T0) == TargetLoad(2, 0, 50, 70)
    load.started(RequestId("r"), T0, 30, 100)
    assert load.load(T0) == TargetLoad(3, 0, 80, 70)
    load.first_token(RequestId("r"))
    assert load.load(T0) == TargetLoad(3, 0, 50, 170)
    report(load, active=1, decode_tokens=70)
    assert load.load(T0) == TargetLoad(2, 0, 0, 170)
    load.finished(RequestId("r"))
    assert load.load(T0) == TargetLoad(1, 0, 0, 70)


def test_slots_of_all_ranks_and_those_that_others_take(load: LoadTracker, clock: Clock) -> None:
    load.add(V, (Target(V, 0), Target(V, 1)), kv_tokens=500, slots=8)
    load.drop(W)
    assert load.slots() == Slots(16, 8, 0, 1000)
    load.add(W, (T0,), kv_tokens=1000, slots=32)
    load.started(RequestId("r"), T0, 30, 100)  # our own
    report(load, active=5)
    assert load.slots() == Slots(48, 32, 5, 2000)
    clock.now += 20
    assert load.slots() == Slots(48, 32, 0, 2000)


def test_our_own_on_its_way_is_not_taken_for_somebody_else_s(load: LoadTracker) -> None:
    load.started(RequestId("r"), T0, 30, 100)
    report(load)  # made before the request arrived there
    assert load.load(T0) == TargetLoad(1, 0, 30, 0)
    load.finished(RequestId("r"))
    report(load)  # made while it ended
    assert load.load(T0) == TargetLoad(0, 0, 0, 0)


def test_requests_that_ended_do_not_wait(load: LoadTracker) -> None:
    load.started(RequestId("r"), T0, 30, 100)
    report(load, waiting=1)
    assert load.load(T0).waiting == 1
    load.finished(RequestId("r"))
    assert load.load(T0).waiting == 0


def test_requests_beyond_the_slots_wait_before_a_report_says_so(clock: Clock) -> None:
    load = LoadTracker(clock)
    load.add(W, (T0,), slots=2)
    for number in range(5):
        load.started(RequestId(str(number)), T0, 0, 10)
    assert load.load(T0) == TargetLoad(5, 3, 0, 0)
    report(load, waiting=4)
    assert load.load(T0).waiting == 4


def test_choices_count_as_the_engines_requests(clock: Clock) -> None:
    """1,024 choices counted as one request: a chat that came next waited 16 s behind them."""
    load = LoadTracker(clock)
    load.add(W, (T0,), slots=64)
    load.started(RequestId("r"), T0, 30, 100, choices=1024)
    assert load.load(T0) == TargetLoad(1024, 960, 30, 0)
    load.finished(RequestId("r"))
    assert load.load(T0) == TargetLoad(0, 0, 0, 0)


def test_old_reports_do_not_count(load: LoadTracker, clock: Clock) -> None:
    load.add(V, (Target(V, 0),))
    report(load, active=8)
    clock.now = 5.0
    load.reported(V, [rank_report(active=3)])
    clock.now = 9.0
    assert load.load(T0).active == 8
    clock.now = 10.0
    assert load.load(T0).active == 0
    assert load.load(Target(V, 0)).active == 3
    load.reported(V, [rank_report(active=4)])
    clock.now = 19.0
    assert load.load(Target(V, 0)).active == 4
    clock.now = 20.0
    assert load.load(Target(V, 0)).active == 0


def test_each_rank_has_its_own(clock: Clock) -> None:
    load = LoadTracker(clock)
    load.add(W, (T0, T1), kv_tokens=100)
    load.started(RequestId("r"), T0, 10, 10)
    load.reported(
        W,
        [
            rank_report(active=1),
            rank_report(1, active=2, waiting=1, prefill_tokens=50, decode_tokens=20),
            rank_report(7, active=9),
        ],
    )
    assert load.load(T0) == TargetLoad(2, 0, 10, 0)
    assert load.load(T1) == TargetLoad(2, 1, 50, 20)
    assert load.targets() == [T0, T1]


def test_one_full_rank_does_not_make_the_other_busy(clock: Clock) -> None:
    load = LoadTracker(clock, thresholds=BusyThresholds(blocks_fraction=0.9))
    load.add(W, (T0, T1), kv_tokens=100)
    load.reported(W, [rank_report(active=1, kv_usage=0.95), rank_report(1, active=1, kv_usage=0.5)])
    assert load.busy() == {T0}


def test_prompts_of_others_on_their_way_fill_a_cache_too(clock: Clock) -> None:
    load = LoadTracker(clock, thresholds=BusyThresholds(blocks_fraction=0.9))
    load.add(W, (T0,), kv_tokens=100)
    load.reported(W, [rank_report(active=1, prefill_tokens=30, kv_usage=0.7)])
    assert load.busy() == {T0}


def test_shares_tell_our_own_from_others(load: LoadTracker) -> None:
    load.started(RequestId("r"), T0, 30, 100)
    report(load, active=2, waiting=1, prefill_tokens=5)
    assert load.shares(T0) == (TargetLoad(1, 0, 30, 0), TargetLoad(2, 1, 5, 0))
    assert load.shares(T1) == (TargetLoad(0, 0, 0, 0), TargetLoad(0, 0, 0, 0))


def test_a_dropped_worker_leaves_nothing_behind(load: LoadTracker) -> None:
    load.started(RequestId("r"), T0, 10, 10)
    load.drop(W)
    load.finished(RequestId("r"))
    report(load, active=1)
    assert load.targets() == []
    load.add(W, (T0,))
    assert load.load(T0) == TargetLoad(0, 0, 0, 0)
