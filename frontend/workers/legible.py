"""What can be read of a message that can't be read as a whole: a bad output ends one request."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from common.errors import ProtocolError
from common.identity import RequestId
from common.request_plane.protocol import MOST_OUTPUTS, Failed, Output, Outputs, ToFrontend
from common.request_plane.wire import Codec


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
