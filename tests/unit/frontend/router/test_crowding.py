"""Answers of one request that fill a KV cache: they end if others wait, and only then."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.outputs import CompletionOutput

from common.errors import RequestRejectedError
from common.identity import RequestId, Target, WorkerId
from frontend.router.crowding import PATIENCE_S, Crowding, GrowingAnswer
from frontend.router.selection import LoadTracker
from tests.fakes.reports import rank_report

TARGET = Target(WorkerId("w"), 0)


class Worker:
    """A worker with room for 1,000 tokens, which a report calls full."""

    def __init__(self) -> None:
        self.now = 100.0
        self.load = LoadTracker(lambda: self.now)
        self.load.add(TARGET.worker_id, (TARGET,), kv_tokens=1000)
        self.crowding = Crowding(lambda: self.now, self.load)
        self.uses(1.0)

    def uses(self, share: float) -> None:
        self.load.reported(TARGET.worker_id, [rank_report(kv_usage=share)])

    def call(self, name: str, choices: int, prompt: int = 1) -> GrowingAnswer:
        self.load.started(RequestId(name), TARGET, prompt, prompt, choices)
        decision: Any = SimpleNamespace(request_id=name, target=TARGET, prompt_tokens=prompt)
        return self.crowding.answer(decision, choices)

    def another_waits(self) -> None:
        self.load.started(RequestId("another"), TARGET, 5, 5)
        self.now += 2 * PATIENCE_S

    def another_is_refused(self) -> None:
        self.crowding.refused()


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


@pytest.mark.parametrize("happens", EVIDENCE)
def test_many_choices_end_once_they_fill_half_of_a_cache_and_another_has_no_room(
    worker: Worker, happens: Callable[[Worker], None]
) -> None:
    answer = worker.call("hog", 4)
    happens(worker)
    answer.grow(step(120, 0, 1, 2, 3))
    with pytest.raises(RequestRejectedError, match=r"4 choices of the request.*501 tokens"):
        answer.grow(step(20, 0))


@pytest.mark.parametrize("happens", EVIDENCE)
def test_calls_of_one_request_count_together(
    worker: Worker, happens: Callable[[Worker], None]
) -> None:
    first, second = worker.call("hog", 1), worker.call("hog.1", 1)
    happens(worker)
    first.grow(step(400, 0))
    with pytest.raises(RequestRejectedError):
        second.grow(step(400, 0))


def test_a_large_request_goes_on_while_nobody_waits(worker: Worker) -> None:
    answer = worker.call("hog", 4)
    worker.call("hog.1", 1)  # of its own calls none counts
    worker.now += 60
    answer.grow(step(240, 0, 1, 2, 3))


def test_a_refusal_of_long_ago_is_forgotten(worker: Worker) -> None:
    answer = worker.call("hog", 4)
    worker.another_is_refused()
    worker.now += 2 * PATIENCE_S
    answer.grow(step(240, 0, 1, 2, 3))


def test_one_long_answer_goes_on_and_so_do_many_in_a_cache_with_room(worker: Worker) -> None:
    one, many = worker.call("long", 1, prompt=800), worker.call("many", 4)
    worker.another_waits()
    one.grow(step(100, 0))
    worker.uses(0.5)
    many.grow(step(150, 0, 1, 2, 3))


def test_answers_that_ended_hold_no_room(worker: Worker) -> None:
    answer = worker.call("hog", 4)
    answer.grow(step(300, 0, ends=True))
    answer.grow(step(300, 1, ends=True))
    worker.another_waits()
    answer.grow(step(300, 2))
    other = worker.call("hog.1", 2)
    answer.end()
    other.grow(step(240, 0, 1))
    other.end()
    assert not vars(worker.crowding)["_tokens"] and not vars(worker.crowding)["_choices"]
