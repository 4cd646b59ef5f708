"""Validate a worker's answers: a bad output ends one request, not the link."""

import itertools
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
import torch
from vllm.logprobs import FlatLogprobs, Logprob

from common.errors import ProtocolError
from common.identity import RequestId
from common.request_plane.protocol import MAX_OUTPUTS, Failed, Output, Outputs, ToFrontend
from common.request_plane.wire import Codec

Logprobs: TypeAlias = FlatLogprobs | Sequence[Mapping[int, Logprob] | None]


class Missing(NamedTuple):
    """An unreadable answer; ``request_id`` is empty if unknown, ``last``
    if the request has ended.
    """

    request_id: RequestId
    last: bool


class _Parts(msgspec.Struct, frozen=True):
    outputs: list[msgspec.Raw]


class _Head(msgspec.Struct, frozen=True, array_like=True):
    request_id: RequestId
    outputs: msgspec.Raw
    finished: bool


_PARTS: Final = msgspec.msgpack.Decoder(_Parts)
_HEAD: Final = msgspec.msgpack.Decoder(_Head)
_UNKNOWN: Final = Missing(RequestId(""), last=False)


def legible(codec: Codec[ToFrontend], frames: Sequence[memoryview]) -> list[Output | Missing]:
    about = codec.about(frames)
    if about.type != Outputs.__struct_config__.tag:
        last = about.type == Failed.__struct_config__.tag
        return [Missing(RequestId(about.request_id), last)]
    try:
        parts = _PARTS.decode(frames[1]).outputs
        if len(parts) > MAX_OUTPUTS:
            return [_UNKNOWN]
        one: Codec[Output] = Codec(Output)
        return [_read(one, [memoryview(part), *frames[2:]]) for part in parts]
    except (msgspec.DecodeError, IndexError, ValueError, RecursionError):
        return [_UNKNOWN]


def _read(codec: Codec[Output], frames: Sequence[memoryview]) -> Output | Missing:
    count = len(frames).to_bytes(4, "little")
    try:
        return codec.decode([memoryview(count), *frames])[0]
    except ProtocolError:
        head = _HEAD.decode(frames[0])
        return Missing(head.request_id, head.finished)


_MAX_REASON_LEN: Final = 64
_MAX_TOKEN: Final = 1 << 32
"""Larger than any vocabulary; a larger number raises OverflowError in Hugging Face's tokenizers."""

_MAX_DIMENSIONS: Final = 4
"""Limit for pooled tensors. PyTorch makes lists of a tensor by recursion: 200,000 dimensions of
size one, in four bytes, end the process."""

_POOLED: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
)


def flaw_of(output: Output) -> str:
    if output.pooled is not None and (
        output.pooled.dtype not in _POOLED
        or output.pooled.ndim > _MAX_DIMENSIONS
        or not output.pooled.numel()  # empty, it may still have a billion rows
    ):
        return "what it pooled is no list of numbers"
    if output.kv_transfer_params is not None and not _is_json(output.kv_transfer_params):
        return "its kv_transfer_params are no JSON"
    for name in ("num_cached_tokens", "num_cache_creation_tokens"):
        if (getattr(output, name) or 0) < 0:
            return f"{name} is negative"
    if output.prompt_logprobs is not None and not _are_numbers(output.prompt_logprobs):
        return "a log probability of the prompt is no number"
    for one in output.outputs:
        if one.index < 0 or min(one.token_ids, default=0) < 0:
            return "an index or a token is negative"
        if max(one.token_ids, default=0) >= _MAX_TOKEN:
            return "a token is of no vocabulary"
        if len(one.finish_reason or "") > _MAX_REASON_LEN:
            return "it ended for no known reason"
        if one.logprobs is not None and not _are_numbers(one.logprobs):
            return "a log probability is no number"
    return ""


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _are_numbers(logprobs: Logprobs) -> bool:
    """Return whether all are numbers, of tokens that a tokenizer can look up. Minus infinity, for
    an impossible token, is one."""
    if isinstance(logprobs, FlatLogprobs) and not _follow_each_other(logprobs):
        return False
    if not all(0 <= token < _MAX_TOKEN for token in _tokens(logprobs)):
        return False
    return all(value < math.inf for value in _values(logprobs))  # false for NaN too


def _follow_each_other(flat: FlatLogprobs) -> bool:
    """Return whether positions partition the values: 3,000 overlapping ones could be 9 million."""
    count = len(flat.logprobs)
    lists = (flat.token_ids, flat.ranks, flat.decoded_tokens)
    return (
        all(len(each) == count for each in lists)
        and len(flat.start_indices) == len(flat.end_indices)
        and flat.start_indices == [0, *flat.end_indices][: len(flat.end_indices)]
        and all(map(operator.le, flat.start_indices, flat.end_indices))
        and (flat.end_indices or [0])[-1] == count
    )


def _tokens(logprobs: Logprobs) -> Iterable[int]:
    if isinstance(logprobs, FlatLogprobs):
        return logprobs.token_ids
    return itertools.chain.from_iterable(place or () for place in logprobs)


def _values(logprobs: Logprobs) -> Iterable[float]:
    if isinstance(logprobs, FlatLogprobs):
        return logprobs.logprobs
    return (one.logprob for place in logprobs for one in (place or {}).values())
