"""Limit what a request may ask of its answer: the size of its structure, and log probabilities.

vLLM reads a structure where other requests wait: in the one thread in which prompts become tokens
here, and on the event loop of a worker, which counts as lost when it is silent for long. Of a list
in a list and so on, 58 deep, 480 KiB took 6 seconds of a core there, and 120 KiB 1.4.

A worker takes 30 µs of its event loop for each log probability, and a frontend 20 µs when it makes
a whole answer. 96 choices of 1,000 tokens with 20 candidates, asked for in 150 bytes, kept one
worker after the other silent for so long that it was taken for lost.
"""

import json
from typing import Any, Final

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams

from common.errors import RequestRejectedError
from frontend.request.batches import Batch
from frontend.request_context import current_context

MOST_BYTES: Final = 128 << 10
"""Of JSON."""

MAX_LOGPROBS: Final = 1 << 17
"""Of all calls of a request: 20 candidates for 6,000 tokens, or 130,000 tokens alone."""

MAX_OF_ONE: Final = 1 << 20
"""Of a request for one choice that is no stream: each takes 130 bytes until the last is there."""

_OF_VOCABULARY: Final = 1 << 19

_ENDLESS: Final = 1 << 20


def check_structure(params: object) -> None:
    """
    Args:
        params: of a request.

    Raises:
        RequestRejectedError: its structure is too large.
    """
    wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
    if wanted is None:
        return
    said = [wanted.json, wanted.regex, wanted.choice, wanted.grammar, wanted.structural_tag]
    size = _bytes([each for each in said if each])
    if size > MOST_BYTES:
        raise RequestRejectedError(
            f"the structure of the answer (a JSON schema, a grammar or choices) has {size} bytes, "
            f"more than {MOST_BYTES}"
        )


def _bytes(value: Any) -> int:
    try:
        return len(msgspec.json.encode(value, enc_hook=str))
    except UnicodeEncodeError:  # half of a surrogate pair, of which vLLM says what is wrong with it
        return len(json.dumps(value, default=str))
    except RecursionError as error:
        raise RequestRejectedError("the structure of the answer is nested too deeply") from error


def check_logprobs(params: object, prompt_tokens: int) -> None:
    """Return if there are not too many with those of the calls of the same request before.

    A request for one choice may have more: ``max_tokens`` is the rest of the context unless it says
    less, and most answers are shorter.

    Args:
        params: of a call.

    Raises:
        RequestRejectedError: there are.
    """
    if not isinstance(params, SamplingParams):
        return
    # Each choice repeats them.
    of_prompt = candidates(params.prompt_logprobs) * prompt_tokens * params.n
    wanted = candidates(params.logprobs, params.logprob_token_ids)
    of_answer = wanted * params.n * (params.max_tokens or _ENDLESS)
    batch = current_context().find(Batch)
    before = batch.logprobs if batch is not None else 0
    if batch is not None:
        batch.logprobs += of_prompt + of_answer
    most = MAX_LOGPROBS
    if not before and params.n == 1 and of_prompt <= most:
        most = MAX_OF_ONE
        if params.output_kind is not RequestOutputKind.FINAL_ONLY:
            of_answer = 0
    if before + of_prompt + of_answer > most and of_prompt + of_answer:
        raise RequestRejectedError(
            f"the request asks for more than {most} log probabilities (its prompts or "
            "choices times their tokens times `top_logprobs`, `logprobs` or `prompt_logprobs`): "
            "ask for fewer, set `max_tokens`, or send several requests"
        )


def candidates(count: int | None, tokens: list[int] | None = None) -> int:
    """Return how many are asked for of each token, itself included."""
    if count is None and not tokens:
        return 0
    most = _OF_VOCABULARY if count == -1 else count or 0
    return 1 + max(most, len(tokens or ()))
