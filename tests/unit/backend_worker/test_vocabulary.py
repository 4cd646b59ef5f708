"""Tokens that a tokenizer has and its model does not end no engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput, embeds_input, tokens_input
from vllm.model_executor.layers.utils import get_token_bin_counts_and_mask
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from backend_worker.engine.sampler_limits import SampledInputs
from backend_worker.engine.vocabulary import check_tokens
from tests.unit.backend_worker.configured import ours

KNOWN = 100
"""Tokens of the model. Its tokenizer has more."""


@pytest.fixture
def inputs(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SampledInputs]:
    config = ours([f"--model={model}", "--dtype=float32", "--enable-prompt-embeds"])
    monkeypatch.setattr(type(config.model_config), "get_vocab_size", lambda _: KNOWN)
    renderer = renderer_from_config(config)
    yield SampledInputs(config, renderer)
    renderer.shutdown()


def ask(inputs: SampledInputs, prompt: EngineInput, **asked: Any) -> EngineCoreRequest:
    return inputs.process_inputs("r", prompt, SamplingParams(**asked), ("generate",))


def test_tokens_that_only_the_tokenizer_has_are_refused(inputs: SampledInputs) -> None:
    strange = tokens_input([1, KNOWN, 2])
    InputProcessor.process_inputs(  # vLLM's own takes them
        inputs, "r", strange, SamplingParams(), ("generate",)
    )
    ask(inputs, tokens_input([1, KNOWN - 1, 2]))
    with pytest.raises(VLLMValidationError, match=f"token {KNOWN} is beyond the {KNOWN}"):
        ask(inputs, strange)


def test_a_prompt_of_embeddings_may_say_any_tokens(inputs: SampledInputs) -> None:
    embeddings = torch.zeros(2, 8)
    ask(inputs, embeds_input(embeddings))
    ask(inputs, embeds_input(embeddings, prompt_token_ids=[KNOWN, 1], is_token_ids=[False, True]))
    with pytest.raises(VLLMValidationError, match="prompt"):
        mixed = embeds_input(
            embeddings, prompt_token_ids=[KNOWN, KNOWN], is_token_ids=[False, True]
        )
        ask(inputs, mixed)


def of(tokens: list[int], params: SamplingParams | PoolingParams, *media: int) -> EngineCoreRequest:
    """Return a request with media of one token each."""
    features = [
        MultiModalFeatureSpec(None, "audio", "hash", PlaceholderRange(offset=at, length=1))
        for at in media
    ]
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=tokens,
        mm_features=features,
        sampling_params=params if isinstance(params, SamplingParams) else None,
        pooling_params=params if isinstance(params, PoolingParams) else None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def check(request: EngineCoreRequest, *, decoder_only: bool = True, second: bool = False) -> None:
    check_tokens(request, KNOWN, decoder_only=decoder_only, second_runner=second)


def test_placeholders_of_media_may_be_beyond_the_vocabulary() -> None:
    check(of([1, KNOWN, 2], SamplingParams(), 1))
    check(of([1, KNOWN, 2], PoolingParams(), 1))
    for request in (
        of([1, KNOWN, KNOWN], SamplingParams(), 1),
        of([1, KNOWN], PoolingParams()),
        of([1, -1], PoolingParams()),
    ):
        with pytest.raises(VLLMValidationError, match="prompt: token"):
            check(request)
    # The media of an encoder have no place among the decoder's tokens.
    with pytest.raises(VLLMValidationError, match="prompt: token"):
        check(of([1, KNOWN, 2], SamplingParams(), 1), decoder_only=False)


def test_a_vocabulary_of_unknown_size_has_all_tokens() -> None:
    check_tokens(of([1 << 20], PoolingParams()), 0, decoder_only=True, second_runner=True)


def test_placeholders_have_no_log_probability() -> None:
    with pytest.raises(VLLMValidationError, match="prompt_logprobs: token"):
        check(of([1, KNOWN, 2], SamplingParams(prompt_logprobs=1), 1))


def test_penalties_count_placeholders_as_far_as_the_first_runner_does() -> None:
    penalty = SamplingParams(repetition_penalty=1.1)
    get_token_bin_counts_and_mask(torch.tensor([[KNOWN]]), KNOWN, 1)
    check(of([1, KNOWN], penalty, 1))
    with pytest.raises(RuntimeError):
        get_token_bin_counts_and_mask(torch.tensor([[KNOWN + 1]]), KNOWN, 1)
    with pytest.raises(VLLMValidationError, match="repetition_penalty: token"):
        check(of([1, KNOWN + 1], penalty, 1))
    check(of([1, KNOWN + 1], penalty, 1), second=True)


def test_no_token_of_another_request_is_barred() -> None:
    """The second runner's kernels look at no bounds."""
    params = SamplingParams(min_tokens=1, stop_token_ids=[5])
    params.all_stop_token_ids.add(KNOWN)
    check(of([1], params))
    assert params.all_stop_token_ids == {5}
    vars_of_words: Any = SamplingParams()
    vars_of_words._bad_words_token_ids = [[1, KNOWN]]
    check(of([1], vars_of_words))
    with pytest.raises(VLLMValidationError, match="bad_words: token"):
        check(of([1], vars_of_words), second=True)
