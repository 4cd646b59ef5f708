"""Log-probabilities of simulated answers."""

from vllm.sampling_params import SamplingParams

from tests.simgpu.logprobs import logprobs_of

VOCABULARY = 100


def test_nobody_gets_any_who_wants_none() -> None:
    assert logprobs_of([SamplingParams(), None], [[1], [2]], VOCABULARY) is None


def test_each_request_has_a_row_with_its_own_token_first() -> None:
    asked = [SamplingParams(logprobs=3), None, SamplingParams(logprobs=0)]
    found = logprobs_of(asked, [[98], [], [7]], VOCABULARY)
    assert found is not None
    assert found.logprob_token_ids.tolist() == [[98, 99, 0, 1], [0, 1, 2, 3], [7, 8, 9, 10]]
    assert found.logprobs.shape == (3, 4)
    assert found.slice_request(2, 1).logprob_token_ids[0][0] == 7


def test_tokens_that_are_named_are_there() -> None:
    found = logprobs_of([SamplingParams(logprob_token_ids=[5, 6])], [[1]], VOCABULARY)
    assert found is not None
    assert found.logprob_token_ids.tolist() == [[1, 5, 6]]
