"""Requests that end an engine on a GPU are refused before it, exactly by vLLM's limits."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.model_executor.layers.utils import apply_penalties
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.worker.gpu.sample import bad_words, logit_bias

from backend_worker.engine.sampler_limits import SampledInputs, check_room, keep_numbers
from tests.unit.backend_worker.configured import ours


class Tensor:
    """Room of a sampler, on no device."""

    def __init__(self, *_: object, **__: object) -> None:
        self.np = np.zeros(1, np.int32)

    def stage_write(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def samplers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what vLLM's second model runner adds a request to."""
    for module in (bad_words, logit_bias):
        monkeypatch.setattr(module, "UvaBackedTensor", Tensor)
        monkeypatch.setattr(module, "StagedWriteTensor", Tensor)
    states: Any = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.ones(1, np.int32)), max_num_reqs=1, device=None
    )
    nothing: Any = None
    return [logit_bias.LogitBiasState(nothing, states), bad_words.BadWordsState(nothing, states)]


TOKENS = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
MANY: list[dict[str, Any]] = [
    {"allowed_token_ids": [5] * 1025},
    {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    {"min_tokens": 1, "stop_token_ids": list(range(129))},
    {"_bad_words_token_ids": [[1] * (TOKENS - 1), [2, 3]]},
]
FEW: list[dict[str, Any]] = [
    {"allowed_token_ids": [5] * 1024},
    {"logit_bias": dict.fromkeys(range(1024), 1.0)},
    {"min_tokens": 1, "stop_token_ids": list(range(128))},
    {"stop_token_ids": list(range(500))},
    {"_bad_words_token_ids": [[1] * (TOKENS - 2), [2, 3]]},
    {},
]


def of(asked: dict[str, Any]) -> SamplingParams:
    params = SamplingParams(**{name: value for name, value in asked.items() if name[0] != "_"})
    for name in asked.keys() & {"_bad_words_token_ids"}:
        setattr(params, name, asked[name])
    return params


@pytest.mark.parametrize("asked", MANY, ids=lambda asked: " ".join(asked))
def test_what_samplers_have_no_room_for_is_refused(
    samplers: list[Any], asked: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="Too many"):
        for sampler in samplers:
            sampler.add_request(0, of(asked))
    with pytest.raises(VLLMValidationError, match="send fewer"):
        check_room(of(asked))


@pytest.mark.parametrize("asked", FEW, ids=lambda asked: " ".join(asked) or "nothing")
def test_what_they_have_room_for_is_not(samplers: list[Any], asked: dict[str, Any]) -> None:
    for sampler in samplers:
        sampler.add_request(0, of(asked))
    check_room(of(asked))


@pytest.fixture(params=[True, False], ids=["second", "first"])
def inputs(
    request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SampledInputs]:
    """Return the input processor of an engine with either model runner."""
    config = ours([f"--model={model}", "--dtype=float32"])
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda _: request.param))
    renderer = renderer_from_config(config)
    yield SampledInputs(config, renderer)
    renderer.shutdown()


def _sampling(inputs: SampledInputs, params: SamplingParams) -> SamplingParams:
    request = inputs.process_inputs("r", tokens_input([1]), params, ("generate",))
    assert request.sampling_params is not None
    return request.sampling_params


def test_numbers_that_any_client_of_tokens_may_send_have_room(inputs: SampledInputs) -> None:
    def ask(**asked: Any) -> SamplingParams:
        return _sampling(inputs, SamplingParams(**asked))

    ask(seed=2**63 - 1)
    ask(seed=-(2**63))
    if inputs.vllm_config.use_v2_model_runner:
        most = inputs.model_config.max_model_len
        asked = ask(max_tokens=2**40, min_tokens=2**39)
        assert (asked.max_tokens, asked.min_tokens) == (most, most)
        assert ask(max_tokens=5).max_tokens == 5
        with pytest.raises(VLLMValidationError, match="seed"):
            ask(seed=2**63)
        ask(seed=2**63 - 2, n=2)
        with pytest.raises(VLLMValidationError, match="seed"):  # of its second choice
            ask(seed=2**63 - 1, n=2)
    else:
        assert ask(max_tokens=2**40, seed=2**63).max_tokens == 2**40


def test_the_second_choice_of_the_largest_seed_has_no_room() -> None:
    params = SamplingParams(seed=2**63 - 1, n=2)
    request: Any = SimpleNamespace(request_id="r", external_req_id="r", params=params)
    _, child = ParentRequest(request).get_child_info(1)
    with pytest.raises(OverflowError):
        np.zeros(1, np.int64)[0] = child.seed


LOGITS = torch.tensor([[9.0, 0.0, -9.0, float("-inf")]])


def probabilities(params: SamplingParams) -> torch.Tensor:
    """Return those of a prompt of all tokens, as samplers compute them in 32 bits."""
    tokens = torch.arange(LOGITS.shape[1])[None]
    penalty = torch.tensor([params.repetition_penalty])
    logits = apply_penalties(
        LOGITS.clone(), tokens, tokens[:, :0], torch.zeros(1), torch.zeros(1), penalty
    )
    return (logits / max(params.temperature, 1e-30)).softmax(-1)


@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-30, 1e30, 1e39, 1e308])
@pytest.mark.parametrize("temperature", [1e-9, 1.0, 2.0])
def test_probabilities_are_numbers(penalty: float, temperature: float) -> None:
    params = SamplingParams(repetition_penalty=penalty, temperature=temperature, top_p=5e-324)
    keep_numbers(params)
    assert probabilities(params).isfinite().all()
    assert np.float32(params.top_p) > 0


def test_a_penalty_that_32_bits_do_not_hold_leaves_no_numbers() -> None:
    assert not probabilities(SamplingParams(repetition_penalty=1e-46)).isfinite().all()


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": StructuredOutputsParams(regex=r"[^\s\S]")},
        {"allowed_token_ids": [5], "min_tokens": 1},
        {"allowed_token_ids": [5], "bad_words": ["a"]},
    ],
    ids=" ".join,
)
def test_samplers_of_seeds_choose_where_no_token_may_be_left(
    inputs: SampledInputs, asked: dict[str, Any]
) -> None:
    def seed(**asked: Any) -> int | None:
        return _sampling(inputs, SamplingParams(**asked)).seed

    assert seed(**asked) is None  # of a CPU
    inputs._has_flashinfer = True
    chosen = seed(**asked)
    assert chosen is not None
    assert chosen != seed(**asked)
    assert seed(**asked, seed=7) == 7
    for one in asked.keys() - {"structured_outputs"}:
        assert seed(**{one: asked[one]}) is None


@pytest.mark.parametrize(
    "asked", [MANY[0], MANY[2], {"bad_words": [f"{n} " * TOKENS for n in range(2)]}], ids=" ".join
)
def test_an_engine_is_asked_for_no_more_than_its_runner_takes(
    inputs: SampledInputs, asked: dict[str, Any]
) -> None:
    def ask() -> None:
        inputs.process_inputs("r", tokens_input([1]), SamplingParams(**asked), ("generate",))

    if inputs.vllm_config.use_v2_model_runner:
        with pytest.raises(VLLMValidationError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            ask()
    else:
        ask()
