"""Reject tokens that a model has no embedding for, or an engine no logit.

vLLM takes each token that the tokenizer has. Some tokenizers have more than their model: a pad
token that was never trained, or a placeholder of media. Outside of media, such a token ends an
engine in its next step, and a request goes on to the next worker.
"""

from collections.abc import Iterable, Sequence

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest


def check_tokens(
    request: EngineCoreRequest, vocabulary: int, *, decoder_only: bool, second_runner: bool
) -> None:
    """Raise VLLMValidationError for a token beyond a ``vocabulary``; 0 is one of unknown size.

    ``decoder_only`` models have media among the tokens of their prompts.
    """
    if not vocabulary:
        return
    params = request.sampling_params
    if params is not None:
        _check_params(params, vocabulary, second_runner)
    strange = _beyond(request.prompt_token_ids or (), vocabulary)
    if not strange:
        return
    media = (each.mm_position for each in request.mm_features or () if decoder_only)
    embedded = {place for each in media for place in range(each.offset, each.offset + each.length)}
    # Beside embeddings, tokens may stand for them.
    tokens = request.prompt_is_token_ids
    if tokens is not None:
        embedded.update(place for place, token in enumerate(tokens) if not token)
    elif request.prompt_embeds is not None:
        embedded.update(strange)
    for place, token in strange.items():
        if place not in embedded:
            raise _rejected(token, vocabulary, "prompt")
    if params is not None and params.prompt_logprobs is not None:
        raise _rejected(max(strange.values()), vocabulary, "prompt_logprobs")
    # The first model runner counts all tokens of a prompt, in one place more than the vocabulary.
    if params is not None and _has_penalties(params) and not second_runner:
        for token in strange.values():
            if token > vocabulary:
                raise _rejected(token, vocabulary, "repetition_penalty")


def _check_params(params: SamplingParams, vocabulary: int, second_runner: bool) -> None:
    # A model may name ends of answers that it can't say. ``min_tokens`` would bar them.
    if params.min_tokens:
        params.all_stop_token_ids.difference_update(_outside(params.all_stop_token_ids, vocabulary))
    if second_runner:  # it would bar a token of another request
        for word in params.bad_words_token_ids or ():
            for token in _outside(word, vocabulary):
                raise _rejected(token, vocabulary, "bad_words")


def _has_penalties(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    )


def _outside(tokens: Iterable[int], vocabulary: int) -> list[int]:
    return [token for token in tokens if not 0 <= token < vocabulary]


def _beyond(tokens: Sequence[int], vocabulary: int) -> dict[int, int]:
    """Return tokens outside of a vocabulary by their places."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocabulary):
        return {}
    return {at: token for at, token in enumerate(tokens) if not 0 <= token < vocabulary}


def _rejected(token: int, vocabulary: int, field: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"{field}: token {token} is beyond the {vocabulary} that the model knows, though the "
        "tokenizer has it: leave it out",
        parameter=field,
    )
