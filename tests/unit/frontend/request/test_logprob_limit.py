"""Log probabilities by the hundred thousand: what one request may ask for."""

from collections.abc import Iterator

import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams

from common.errors import RequestRejectedError
from frontend.request.answer_limits import (
    MAX_LOGPROBS,
    MAX_OF_ONE,
    MAX_REPEATED,
    MEDIUM_AS_TOKENS,
    biases_of,
    check_choices,
    check_logprobs,
)
from frontend.request.call_gate import Batch
from frontend.request_context import current_context
from tests.unit.frontend.http.asking import asking

LARGE = 152_000
"""Tokens of a large vocabulary."""


@pytest.fixture(autouse=True)
def batch() -> Iterator[Batch]:
    batch = Batch("")
    with asking():
        current_context().put(batch)
        yield batch


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (SamplingParams(n=96, logprobs=20, max_tokens=1000), 3),
        (SamplingParams(n=2, logprobs=0, max_tokens=MAX_LOGPROBS), 3),
        (SamplingParams(n=2, logprobs=1, max_tokens=None), 3),
        (SamplingParams(n=2, logprobs=-1, max_tokens=3), 3),
        (SamplingParams(n=96, logprob_token_ids=[*range(128)], logprobs=0, max_tokens=99), 3),
        (SamplingParams(prompt_logprobs=20, max_tokens=1), 20_000),
        (SamplingParams(n=10, prompt_logprobs=1, max_tokens=1), 10_000),
    ],
)
def test_too_many_are_refused(params: SamplingParams, tokens: int) -> None:
    with pytest.raises(RequestRejectedError, match=f"more than {MAX_LOGPROBS} log probabilities"):
        check_logprobs(params, tokens, LARGE)


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (SamplingParams(n=1024, max_tokens=100_000), 3),
        (SamplingParams(n=1, logprobs=20, max_tokens=130_000), 3),
        (SamplingParams(n=8, logprobs=5, max_tokens=2000), 3),
        (SamplingParams(prompt_logprobs=1, logprobs=20, max_tokens=130_000), 3),
        (SamplingParams(prompt_logprobs=0, max_tokens=1), 130_000),
        (PoolingParams(), 130_000),
    ],
)
def test_others_pass(params: SamplingParams | PoolingParams, tokens: int) -> None:
    check_logprobs(params, tokens, LARGE)


def test_choices_repeat_their_prompts_within_a_limit() -> None:
    check_choices(SamplingParams(n=1), 2 * MAX_REPEATED, 0)
    check_choices(PoolingParams(), 2 * MAX_REPEATED, 0)
    check_choices(SamplingParams(n=16), MAX_REPEATED // 32, 0)
    with pytest.raises(RequestRejectedError, match="each of its choices"):
        check_choices(SamplingParams(n=16), MAX_REPEATED // 16, 0)  # together with the one before


def test_choices_repeat_their_media_within_a_limit() -> None:
    most = MAX_REPEATED // MEDIUM_AS_TOKENS
    check_choices(SamplingParams(n=1), 1000, most)
    check_choices(SamplingParams(n=16), 1000, most // 32)
    with pytest.raises(RequestRejectedError, match="a medium as"):
        check_choices(SamplingParams(n=64), 1000, most // 64)


def test_those_of_all_prompts_of_a_request_count() -> None:
    params = SamplingParams(prompt_logprobs=20, max_tokens=1)
    check_logprobs(params, 5000, LARGE)
    with pytest.raises(RequestRejectedError, match="log probabilities"):
        check_logprobs(params, 5000, LARGE)


def test_many_prompts_are_no_way_to_many_choices() -> None:
    params = SamplingParams(logprobs=20, max_tokens=6000)
    check_logprobs(params, 3, LARGE)
    with pytest.raises(RequestRejectedError, match="log probabilities"):
        check_logprobs(params, 3, LARGE)


def test_a_request_without_any_is_not_refused_for_another_one() -> None:
    check_logprobs(SamplingParams(logprobs=20, max_tokens=130_000), 3, LARGE)
    check_logprobs(SamplingParams(), 3, LARGE)


def test_what_is_kept_until_its_end_may_have_fewer_than_a_stream() -> None:
    whole = SamplingParams(logprobs=20, max_tokens=60_000)
    whole.output_kind = RequestOutputKind.FINAL_ONLY
    with pytest.raises(RequestRejectedError, match=f"more than {MAX_OF_ONE} log probabilities"):
        check_logprobs(whole, 3, LARGE)


def test_all_of_a_vocabulary_are_as_many_as_it_has() -> None:
    """They counted as half a million for each token, so that two were too many."""
    whole = SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=6)
    whole.output_kind = RequestOutputKind.FINAL_ONLY
    check_logprobs(whole, 100, 1000)
    with pytest.raises(RequestRejectedError, match=f"more than {MAX_LOGPROBS} log probabilities"):
        check_logprobs(whole, 3, LARGE)


def test_what_samplers_read_again_counts_for_each_choice() -> None:
    bias = dict.fromkeys(range(7), 1.0)
    assert biases_of(SamplingParams(n=3, logit_bias=bias, stop_token_ids=[1, 2])) == 21
    assert biases_of(SamplingParams(stop_token_ids=[1, 2, 2], min_tokens=1)) == 2
    assert biases_of(SamplingParams(n=3, allowed_token_ids=[1] * 800)) == 600
