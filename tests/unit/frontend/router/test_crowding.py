"""Answers of one request that fill a KV cache: they end if others wait, and only then."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.outputs import CompletionOutput

from common.errors import RequestRejectedError
from common.identity import Target, WorkerId
from frontend.request_context import begin
from frontend.router.crowding import PATIENCE_S, POLL_INTERVAL_S, Crowding, GrowingAnswer
from frontend.router.selection import LoadTracker
from tests.fakes.reports import rank_report

TARGET = Target(WorkerId("w"), 0)


class Worker:
    """A worker with room for 1,000 tokens, which a report calls full."""

    def __init__(self, kv_tokens: int = 1000) -> None:
        self.now = 100.0
        self.load = LoadTracker(lambda: self.now)
        self.load.add(TARGET.worker_id, (TARGET,), kv_tokens)
        self.crowding = Crowding(lambda: self.now, self.load)
        self.uses(1.0)

    def uses(self, share: float) -> None:
        self.load.reported(TARGET.worker_id, [rank_report(kv_usage=share)])

    def call(self, name: str, choices: int, prompt: int = 1, peer: str = "here") -> GrowingAnswer:
        begin().peer = peer
        decision: Any = SimpleNamespace(request_id=name, target=TARGET, prompt_tokens=prompt)
        return self.crowding.answer(decision, choices)

    def another_waits(self, peer: str = "there") -> None:
        self.call("another", 1, peer=peer)
        self.now += 2 * PATIENCE_S

    def another_is_refused(self, peer: str = "there") -> None:
        begin().peer = peer
        self.crowding.refused()
        self.now += PATIENCE_S / 2


def step(tokens: int, *choices: int, ends: bool = False) -> list[CompletionOutput]:
    reason = "stop" if ends else None
    return [
        CompletionOutput(each, "", [7] * tokens, None, None, finish_reason=reason)
        for each in choices
    ]


@pytest.fixture
def worker() -> Worker:
    return Worker()


EVIDENCE = (Worker.another_waits, Worker.another_is_refused)
MANY = range(20)


@pytest.mark.parametrize("happens", EVIDENCE)
def test_many_choices_end_once_they_fill_half_of_a_cache_and_another_has_no_room(
    worker: Worker, happens: Callable[[Worker], None]
) -> None:
    answer = worker.call("hog", 20)
    answer.grow(step(24, *MANY))
    happens(worker)
    answer.grow(step(0, 0))
    worker.now += POLL_INTERVAL_S
    with pytest.raises(RequestRejectedError, match=r"20 choices of the request.*501 tokens"):
        answer.grow(step(20, 0))


def test_of_clients_refused_two_are_remembered(worker: Worker) -> None:
    answer = worker.call("hog", 20)
    answer.grow(step(26, *MANY))
    for peer in ("one", "two", "three", "here", "here"):
        worker.another_is_refused(peer)
        worker.now -= PATIENCE_S / 2
    assert len(vars(worker.crowding)["_refused"]) == 2
    worker.now += POLL_INTERVAL_S
    with pytest.raises(RequestRejectedError, match="other clients"):
        answer.grow(step(1, 0))


@pytest.mark.parametrize("happens", EVIDENCE)
def test_a_client_waits_for_its_own_requests(
    worker: Worker, happens: Callable[[Worker, str], None]
) -> None:
    answer = worker.call("hog", 20)
    happens(worker, "here")
    answer.grow(step(40, *MANY))


@pytest.mark.parametrize("happens", EVIDENCE)
def test_calls_of_one_request_count_together(
    worker: Worker, happens: Callable[[Worker], None]
) -> None:
    first, second = worker.call("hog", 10), worker.call("hog.1", 10)
    first.grow(step(40, *range(10)))
    happens(worker)
    with pytest.raises(RequestRejectedError):
        second.grow(step(40, *range(10)))


def test_a_large_request_goes_on_while_nobody_waits(worker: Worker) -> None:
    answer = worker.call("hog", 20)
    worker.call("hog.1", 1)  # of its own calls none counts
    worker.now += 60
    answer.grow(step(48, *MANY))


def test_a_refusal_of_long_ago_is_forgotten(worker: Worker) -> None:
    answer = worker.call("hog", 20)
    worker.another_is_refused()
    worker.now += 2 * PATIENCE_S
    answer.grow(step(48, *MANY))
    assert not vars(worker.crowding)["_refused"]


def test_few_long_answers_go_on_and_so_do_many_in_a_cache_with_room(worker: Worker) -> None:
    few, many = worker.call("long", 16, prompt=800), worker.call("many", 20)
    worker.another_waits()
    few.grow(step(10, 0))
    worker.uses(0.5)
    worker.now += POLL_INTERVAL_S
    many.grow(step(30, *MANY))


def test_nothing_fills_a_cache_of_unknown_size() -> None:
    worker = Worker(kv_tokens=0)
    answer = worker.call("hog", 20)
    worker.another_waits()
    answer.grow(step(48, *MANY))


def test_answers_that_ended_hold_no_room(worker: Worker) -> None:
    answer = worker.call("hog", 40)
    answer.grow(step(30, *MANY, ends=True))
    worker.another_waits()
    answer.grow(step(20, *range(20, 40)))
    other = worker.call("hog.1", 20)
    answer.end()
    worker.now += POLL_INTERVAL_S
    other.grow(step(20, *MANY))
