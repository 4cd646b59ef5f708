"""Reject or change requests with which vLLM's samplers, on GPUs, would end an engine.

vLLM's second model runner, its default on GPUs, keeps a few entries of each request beside the
logits. It raises an error for more while it adds a request, which ends the engine, and vLLM checks
none of these before: 5 KB with 1,025 ``allowed_token_ids`` ended one engine after the other.

Samplers compute in 32 bits. A penalty of 1e-46 is zero there, and logits are no numbers any more.
FlashInfer's sampler, vLLM's default on CUDA, then reads memory that holds no probabilities.
"""

import random
from typing import Any, Final

from vllm.envs import VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from backend_worker.engine.vocabulary import check_tokens
from common.vllm_compat.structures_once import ReadingOnce

MAX_ALLOWED: Final = 1024
MAX_BIASES: Final = 1024
MAX_STOP_TOKENS: Final = 128
"""vLLM's limits, in a module that reaches for a device. A test compares them."""

_SEEDS: Final = range(-1 << 63, 1 << 63)

MIN_PENALTY: Final = 1e-30
MAX_PENALTY: Final = 1e30
"""Logits times or through these are numbers of 32 bits, also at the lowest temperature."""

MIN_TOP_P: Final = 1e-6
"""The likeliest token of any vocabulary has as much."""


class SampledInputs(ReadingOnce):
    """vLLM's input processor, with the limits of a model's vocabulary and of the model runner."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits_samplers = self.vllm_config.use_v2_model_runner
        self._has_flashinfer = current_platform.is_cuda()

    def process_inputs(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> EngineCoreRequest:
        """See vLLM's. Raises VLLMValidationError beyond a limit."""
        request = super().process_inputs(request_id, prompt, params, *args, **options)
        check_tokens(
            request,
            self.model_config.get_vocab_size(),
            decoder_only=not self.model_config.is_encoder_decoder,
            second_runner=self._limits_samplers,
        )
        sampling = request.sampling_params
        if sampling is None:
            return request
        keep_numbers(sampling)
        # vLLM samples requests with a seed, and all beside them, without FlashInfer.
        if self._has_flashinfer and sampling.seed is None and may_bar_all(sampling):
            sampling.seed = random.getrandbits(62)
        if self._limits_samplers:
            check_room(sampling)
            # With --enable-scale-out a client may send any, and 32 bits hold it.
            most = self.model_config.max_model_len
            sampling.max_tokens = min(sampling.max_tokens or most, most)
            sampling.min_tokens = min(sampling.min_tokens, most)
        return request


def keep_numbers(params: SamplingParams) -> None:
    """Change parameters so that logits stay numbers of 32 bits."""
    params.repetition_penalty = min(max(params.repetition_penalty, MIN_PENALTY), MAX_PENALTY)
    params.top_p = max(params.top_p, MIN_TOP_P)


def may_bar_all(params: SamplingParams) -> bool:
    """Return whether processed parameters may leave no token: a regex may match nothing."""
    return params.structured_outputs is not None or bool(
        params.allowed_token_ids and (params.bad_words_token_ids or params.min_tokens)
    )


def check_room(params: SamplingParams) -> None:
    """Raise VLLMValidationError if samplers have no room for processed parameters."""
    # Each choice has a seed of its own, counted up.
    if params.seed is not None and not all(
        seed in _SEEDS for seed in (params.seed, params.seed + params.n - 1)
    ):
        raise VLLMValidationError("seed: a number of 64 bits with its sign", parameter="seed")
    # With ``min_tokens`` samplers keep the tokens that end an answer, the model's own included.
    ends = params.all_stop_token_ids if params.min_tokens > 0 else ()
    words = params.bad_words_token_ids or ()
    for field, count, most in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MAX_ALLOWED),
        ("logit_bias", len(params.logit_bias or ()), MAX_BIASES),
        ("stop_token_ids", len(ends), MAX_STOP_TOKENS),
        ("bad_words", sum(map(len, words)), VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if count > most:
            raise VLLMValidationError(
                f"{field} has {count} tokens, more than the {most} that this model's engine has "
                "room for: send fewer, or ask the operator for VLLM_USE_V2_MODEL_RUNNER=0 on "
                "workers",
                parameter=field,
            )
