"""What no engine says, though it can be read: an answer with it is its worker's fault.

Further on it would be a 400, since what is made of it can't be written as JSON.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.logprobs import FlatLogprobs

from common.request_plane.protocol import Output


def flaw_of(output: Output) -> str:
    """Return what is wrong with an output, in words; empty if nothing is."""
    for name in ("num_cached_tokens", "num_cache_creation_tokens"):
        if (getattr(output, name) or 0) < 0:
            return f"{name} is negative"
    if output.prompt_logprobs is not None and not _are_numbers(output.prompt_logprobs):
        return "a log probability of the prompt is no number"
    for one in output.outputs:
        if one.index < 0 or min(one.token_ids, default=0) < 0:
            return "an index or a token is negative"
        if one.logprobs is not None and not _are_numbers(one.logprobs):
            return "a log probability is no number"
    return ""


def _are_numbers(logprobs: Any) -> bool:
    """Whether all are; minus infinity is one, of a token that can't be."""
    return all(value < math.inf for value in _values(logprobs))  # which NaN isn't either


def _values(logprobs: Any) -> Iterable[float]:
    if isinstance(logprobs, FlatLogprobs):
        return logprobs.logprobs
    return _of_places(logprobs)


def _of_places(places: Iterable[Any]) -> Iterator[float]:
    for place in places:
        for one in (place or {}).values():
            yield one.logprob
