"""How many log probabilities one request may ask for.

A worker takes 30 µs of its event loop for each, and a frontend 20 µs when it makes a whole answer.
96 choices of 1,000 tokens with 20 candidates, asked for in 150 bytes, kept one worker after the
other silent for so long that it was taken for lost.
"""

from typing import Final

from vllm.sampling_params import SamplingParams

from common.errors import RequestRejectedError
from frontend.request.batches import Batch
from frontend.request_context import current_context

MAX_LOGPROBS: Final = 1 << 17
"""Of all calls of a request: 20 candidates for 6,000 tokens, or 130,000 tokens alone."""

_OF_VOCABULARY: Final = 1 << 19
_ENDLESS: Final = 1 << 20


def check_logprobs(params: object, prompt_tokens: int) -> None:
    """Return if there are not too many with those of the calls of the same request before.

    A request for one choice may have as many as its tokens allow: ``max_tokens`` is the rest of the
    context unless it says less, and most answers are shorter.

    Args:
        params: of a call.

    Raises:
        RequestRejectedError: there are.
    """
    if not isinstance(params, SamplingParams):
        return
    of_prompt = candidates(params.prompt_logprobs) * prompt_tokens
    wanted = candidates(params.logprobs, params.logprob_token_ids)
    of_answer = wanted * params.n * (params.max_tokens or _ENDLESS)
    batch = current_context().find(Batch)
    before = batch.logprobs if batch is not None else 0
    if batch is not None:
        batch.logprobs += of_prompt + of_answer
    if not before and params.n == 1:
        of_answer = 0
    if before + of_prompt + of_answer > MAX_LOGPROBS and of_prompt + of_answer:
        raise RequestRejectedError(
            f"the request asks for more than {MAX_LOGPROBS} log probabilities (its prompts or "
            "choices times their tokens times `top_logprobs`, `logprobs` or `prompt_logprobs`): "
            "ask for fewer, set `max_tokens`, or send several requests"
        )


def candidates(count: int | None, tokens: list[int] | None = None) -> int:
    """Return how many are asked for of each token, itself included."""
    if count is None and not tokens:
        return 0
    most = _OF_VOCABULARY if count == -1 else count or 0
    return 1 + max(most, len(tokens or ()))
