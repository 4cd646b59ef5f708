"""Load: our own requests exactly, those of others from reports."""

import pytest

from common.identity import RequestId, Target, WorkerId
from frontend.router.selection.load import LoadTracker, TargetLoad

W = WorkerId("w")
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


def report(load: LoadTracker, running: int, waiting: int = 0, queued: int = 0) -> None:
    load.reported(W, running=running, waiting=waiting, queued_tokens=queued, kv_usage=0.0)


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


def test_only_what_exceeds_our_own_requests_is_foreign(load: LoadTracker) -> None:
    load.started(RequestId("r"), T0, 30, 100)
    report(load, running=1, queued=100)
    assert load.load(T0) == TargetLoad(1, 0, 30, 0)
    report(load, running=2, waiting=2, queued=200)
    assert load.load(T0) == TargetLoad(4, 2, 130, 0)
    load.finished(RequestId("r"))
    assert load.load(T0) == TargetLoad(3, 2, 100, 0)


def test_blocks_in_use_beyond_our_own_are_foreign_contexts(load: LoadTracker) -> None:
    load.started(RequestId("r"), T0, 30, 100)
    load.first_token(RequestId("r"))
    load.reported(W, running=2, waiting=0, queued_tokens=0, kv_usage=0.5)
    assert load.load(T0).decode_tokens == 500


def test_requests_that_ended_do_not_wait(load: LoadTracker) -> None:
    load.started(RequestId("r"), T0, 30, 100)
    report(load, running=0, waiting=1)
    assert load.load(T0).waiting == 1
    load.finished(RequestId("r"))
    assert load.load(T0).waiting == 0


def test_old_reports_do_not_count(load: LoadTracker, clock: Clock) -> None:
    report(load, running=5, waiting=3)
    clock.now = 9.0
    assert load.load(T0).active == 8
    clock.now = 10.0
    assert load.load(T0).active == 0


def test_a_report_is_shared_among_ranks(clock: Clock) -> None:
    load = LoadTracker(clock)
    load.add(W, (T0, T1), kv_tokens=100)
    load.started(RequestId("r"), T0, 10, 10)
    load.reported(W, running=4, waiting=1, queued_tokens=50, kv_usage=0.25)
    assert load.load(T0) == TargetLoad(3, 0.5, 30, 20)
    assert load.load(T1) == TargetLoad(2, 0.5, 20, 20)


def test_a_dropped_worker_leaves_nothing_behind(load: LoadTracker) -> None:
    load.started(RequestId("r"), T0, 10, 10)
    load.drop(W)
    load.finished(RequestId("r"))
    report(load, running=1)
    assert load.statistics() == {}
    load.add(W, (T0,))
    assert load.load(T0) == TargetLoad(0, 0, 0, 0)
