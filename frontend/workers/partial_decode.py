"""Checks of a worker's answers: a bad output ends one request, not the link."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
from vllm.logprobs import FlatLogprobs, Logprob

from common.errors import ProtocolError
from common.identity import RequestId
from common.request_plane.protocol import MOST_OUTPUTS, Failed, Output, Outputs, ToFrontend
from common.request_plane.wire import Codec

Logprobs: TypeAlias = FlatLogprobs | Sequence[Mapping[int, Logprob] | None]


class Missing(NamedTuple):
    """An answer that can't be read.

    Attributes:
        request_id: whose it is; empty if that can't be told.
        last: whether the worker has ended the request with it.
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
    """The outputs in a message that the codec could not read, and what it was about otherwise."""
    about = codec.about(frames)
    if about.type != Outputs.__struct_config__.tag:
        last = about.type == Failed.__struct_config__.tag
        return [Missing(RequestId(about.request_id), last)]
    try:
        parts = _PARTS.decode(frames[1]).outputs
        if len(parts) > MOST_OUTPUTS:
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


def _are_numbers(logprobs: Logprobs) -> bool:
    """Return whether all are; minus infinity is one, of a token that can't be."""
    return all(value < math.inf for value in _values(logprobs))  # false for NaN too


def _values(logprobs: Logprobs) -> Iterable[float]:
    if isinstance(logprobs, FlatLogprobs):
        return logprobs.logprobs
    return (one.logprob for place in logprobs for one in (place or {}).values())
