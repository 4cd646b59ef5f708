"""Limit what a request may ask of its answer: the size of its structure, and log probabilities.

vLLM reads a structure in the frontend's one tokenizer thread, and on the event loop of a worker. A
worker that is silent for long counts as lost. Lists nested 58 deep took a core 6 seconds there for
480 KiB, and 1.4 for 120 KiB.

Each log probability took 30 µs of a worker's event loop, and takes 20 µs of a frontend for a whole
answer. A request of 150 bytes for 96 choices of 1,000 tokens with 20 candidates silenced one worker
after the other, until each was taken for lost.
"""

import json
from typing import Any, Final

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams

from common.errors import RequestRejectedError
from frontend.request.call_gate import batch_of_request

MAX_BYTES: Final = 128 << 10
"""Bytes of a structure, as JSON."""

MAX_LOGPROBS: Final = 1 << 17
"""Log probabilities of all calls of a request: 20 candidates for 6,000 tokens, or 130,000 alone."""

MAX_OF_ONE: Final = 1 << 20
"""Log probabilities of an unstreamed request for one choice. Each takes 130 bytes until the end."""

MAX_REPEATED: Final = 1 << 20
"""Tokens of prompts times their choices, where there are several: eight of 131,072. vLLM reads a
prompt again for each, in the engine's process: 52,000 tokens with 40 choices, in 150 KB, kept
others waiting for 1.2 seconds, with 1,000 choices for half a minute."""

MEDIUM_AS_TOKENS: Final = 512
"""Weight of a medium, in tokens, beside its own. Each choice hands it to the engine again, for
0.3 ms: 200 small pictures with 64 choices, in 54 KB, kept others waiting for 4 seconds."""

_OF_VOCABULARY: Final = 1 << 19
"""More tokens than the largest vocabularies have."""

_ENDLESS: Final = 1 << 20


def prompt_weight(prompt: object, choices: int = 1) -> int:
    """Return the tokens of a rendered prompt, and for each choice what engines read again: an
    encoder's tokens, and :data:`MEDIUM_AS_TOKENS` for each of its media; 0 for embeddings and for
    a prompt that is not rendered.
    """
    if not isinstance(prompt, dict):
        return 0
    decoded = prompt.get("decoder_prompt", prompt)
    media = sum(map(len, decoded.get("mm_placeholders", {}).values()))
    again = MEDIUM_AS_TOKENS * media + _tokens(prompt.get("encoder_prompt", {}))
    return _tokens(decoded) + again * choices


def _tokens(prompt: dict[str, Any]) -> int:
    return len(prompt.get("prompt_token_ids") or ())


ALLOWED_AS_BIAS: Final = 4
"""Allowed tokens that weigh as much as a bias. An engine reads them once for each choice: 262,000
of four choices take it 0.3 s. Eight such requests, of 1.8 MB, kept others waiting for 8 s."""


def biases_of(params: SamplingParams) -> int:
    """Return how many tokens with a bias, or barred by ``min_tokens``, all choices have. Allowed
    tokens weigh less.
    """
    barred = len(params.all_stop_token_ids) if params.min_tokens else 0
    allowed = len(params.allowed_token_ids or ()) // ALLOWED_AS_BIAS
    return params.n * (len(params.logit_bias or ()) + barred + allowed)


def check_structure(params: object) -> None:
    """Raise RequestRejectedError if a request's structure is too large."""
    wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
    if wanted is None:
        return
    said = [wanted.json, wanted.regex, wanted.choice, wanted.grammar, wanted.structural_tag]
    size = _bytes([each for each in said if each])
    if size > MAX_BYTES:
        raise RequestRejectedError(
            f"the structure of the answer (a JSON schema, a grammar or choices) has {size} bytes, "
            f"more than {MAX_BYTES}"
        )


def _bytes(value: Any) -> int:
    try:
        return len(msgspec.json.encode(value, enc_hook=str))
    except UnicodeEncodeError:  # a lone surrogate, which vLLM rejects with a reason
        return len(json.dumps(value, default=str))
    except RecursionError as error:
        raise RequestRejectedError("the structure of the answer is nested too deeply") from error


def check_choices(params: object, prompt_tokens: int, media: int) -> None:
    """Raise RequestRejectedError if a request's calls so far repeat their prompts too often."""
    if not isinstance(params, SamplingParams) or params.n == 1:
        return
    batch = batch_of_request()
    batch.repeated += params.n * (prompt_tokens + MEDIUM_AS_TOKENS * media)
    if batch.repeated > MAX_REPEATED:
        raise RequestRejectedError(
            f"the prompts of the request have more than {MAX_REPEATED} tokens when each is counted "
            f"with each of its choices, and a medium as {MEDIUM_AS_TOKENS} more: "
            "ask for fewer with `n`, or send several requests"
        )


def check_logprobs(params: object, prompt_tokens: int, vocabulary: int) -> None:
    """Raise RequestRejectedError if a request's calls so far ask for too many log probabilities.

    A request for one choice may ask for more: ``max_tokens`` is the rest of the context unless it
    is set, and most answers are shorter. A count of -1 asks for all tokens of the vocabulary.
    """
    if not isinstance(params, SamplingParams):
        return
    # Each choice repeats them.
    of_prompt = candidates(params.prompt_logprobs, of_all=vocabulary) * prompt_tokens * params.n
    wanted = candidates(params.logprobs, params.logprob_token_ids, vocabulary)
    of_answer = wanted * params.n * (params.max_tokens or _ENDLESS)
    batch = batch_of_request()
    before = batch.logprobs
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


def candidates(
    count: int | None, tokens: list[int] | None = None, of_all: int = _OF_VOCABULARY
) -> int:
    """Return how many log probabilities each token gets, its own included."""
    if count is None and not tokens:
        return 0
    most = of_all if count == -1 else count or 0
    return 1 + max(most, len(tokens or ()))
