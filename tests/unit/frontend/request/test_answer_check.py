"""A worker says what it was asked for, and no more."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams

from common.errors import WorkerGarbledError
from common.identity import RequestId
from common.request_plane.protocol import Output
from frontend.request.answer_check import (
    MAX_CHOICE_EXPERT_BYTES,
    MAX_EMPTY,
    MAX_EXPERT_BYTES,
    MAX_TOKEN_TEXT,
    AnswerCheck,
)


def said(tokens: int = 1, prompt: Any = None, **fields: Any) -> Output:
    one = CompletionOutput(0, "x", [7] * tokens, None, None)
    return Output(RequestId("r"), [dataclasses.replace(one, **fields)], False, prompt)


def of(count: int, positions: int = 1) -> list[dict[int, Logprob]]:
    return [{token: Logprob(-1.0) for token in range(count)}] * positions


def flat(count: int, positions: int = 1) -> FlatLogprobs:
    found = FlatLogprobs()
    found.extend(of(count, positions))
    return found


@pytest.mark.parametrize(
    ("params", "output"),
    [
        ({}, said(11)),
        ({}, said(10)),
        ({}, said(logprobs=of(1))),
        ({"logprobs": 3}, said(logprobs=None)),
        ({"logprobs": 3}, said(2, logprobs=of(1))),
        ({"logprobs": 3}, said(logprobs=of(5))),
        ({"logprobs": 3}, said(logprobs=flat(5))),
        ({"logprobs": 3}, said(2, logprobs=[*of(5), *of(1)])),
        ({"logprob_token_ids": [1, 2]}, said(logprobs=of(4))),
        ({}, said(text="x" * (2 * MAX_TOKEN_TEXT + 1))),
        ({}, said(prompt=[None, *of(1)])),
        ({"prompt_logprobs": 2}, said(prompt=[None, *of(4)])),
        ({"prompt_logprobs": 2}, said(prompt=[None, *of(3, 2)])),
        ({"prompt_logprobs": 2}, said(prompt=flat(3, 3))),
        ({}, said(routed_experts=np.zeros(3 * MAX_EXPERT_BYTES + 1, np.uint8))),
    ],
)
def test_more_or_less_is_its_workers_fault(params: dict[str, Any], output: Output) -> None:
    with pytest.raises(WorkerGarbledError, match="a worker "):
        AnswerCheck(SamplingParams(max_tokens=10, **params), prompt_tokens=2).check(
            output, len(output.outputs[0].token_ids)
        )


@pytest.mark.parametrize(
    ("params", "output"),
    [
        ({}, said(9)),
        ({}, said(10, finish_reason="length")),
        ({"n": 2}, said(20, finish_reason="length")),
        ({}, said(0)),
        ({"logprobs": 0}, said(2, logprobs=of(1, 2))),
        ({"logprobs": 3}, said(2, logprobs=of(4, 2))),
        ({"logprobs": 3}, said(2, logprobs=flat(4, 2))),
        ({"logprobs": 3}, said(0, logprobs=[])),
        ({"logprobs": 3}, said(0, logprobs=None)),
        ({"logprobs": -1}, said(logprobs=of(1_000))),
        ({"logprob_token_ids": [1, 2]}, said(logprobs=of(3))),
        ({}, said(text="x" * 2 * MAX_TOKEN_TEXT)),
        ({"prompt_logprobs": 2}, said(prompt=[None, *of(3)])),
        ({"prompt_logprobs": 2}, said(prompt=flat(3, 2))),
        ({}, said(routed_experts=np.zeros((2, 61, 8), np.int32))),
    ],
)
def test_what_was_asked_for_is_taken(params: dict[str, Any], output: Output) -> None:
    check = AnswerCheck(SamplingParams(max_tokens=10, **params), prompt_tokens=2)
    check.check(output, len(output.outputs[0].token_ids))


def test_text_adds_up() -> None:
    check = AnswerCheck(SamplingParams(max_tokens=10))
    for tokens in range(1, 4):
        check.check(said(text="x" * MAX_TOKEN_TEXT), tokens)
    check.check(said(0, text="x" * MAX_TOKEN_TEXT), 3)
    with pytest.raises(WorkerGarbledError, match="more text"):
        check.check(said(0, text="x"), 3)


def test_an_answer_without_a_limit_may_go_on() -> None:
    AnswerCheck(SamplingParams(max_tokens=None)).check(said(1_000), 1_000_000)


def test_routed_experts_of_long_answers_have_a_limit_too() -> None:
    check = AnswerCheck(SamplingParams(max_tokens=None), prompt_tokens=1 << 20)
    check.check(said(routed_experts=np.zeros(MAX_CHOICE_EXPERT_BYTES, np.uint8)), 1)
    with pytest.raises(WorkerGarbledError, match="routed experts"):
        check.check(said(routed_experts=np.zeros(MAX_CHOICE_EXPERT_BYTES + 1, np.uint8)), 1)


def test_an_answer_of_nothing_ends() -> None:
    """It would hold its request, and the event loop, for ever."""
    check = AnswerCheck(SamplingParams(max_tokens=10), prompt_tokens=2)
    for _ in range(3 + MAX_EMPTY):
        check.count_empty()
    with pytest.raises(WorkerGarbledError, match="nothing too often"):
        check.count_empty()
