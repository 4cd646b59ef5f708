"""What can be read of outputs that can't be read as a whole: one bad one ends no other request."""

from collections.abc import Sequence
from typing import Final

import msgspec

from common.errors import ProtocolError
from common.identity import RequestId
from common.protocol import MOST_OUTPUTS, Output, Outputs
from common.wire import Codec


class Illegible(msgspec.Struct, frozen=True, array_like=True):
    """As much of an :class:`Output` as says what it was about.

    Attributes:
        finished: whether it was the last one of its request.
    """

    request_id: RequestId
    outputs: msgspec.Raw
    finished: bool


class _Parts(msgspec.Struct, frozen=True):
    type: str
    outputs: list[msgspec.Raw]


_PARTS: Final = msgspec.msgpack.Decoder(_Parts)
_ILLEGIBLE: Final = msgspec.msgpack.Decoder(Illegible)
_TAG: Final = Outputs.__struct_config__.tag


def legible_outputs(frames: Sequence[memoryview]) -> list[Output | Illegible]:
    """Each output of a message, or what it was about.

    Raises:
        ProtocolError: it is no message of outputs, or does not say whose they are.
    """
    try:
        parts = _PARTS.decode(frames[1])
        if parts.type != _TAG or not 1 <= len(parts.outputs) <= MOST_OUTPUTS:
            raise ProtocolError("it has no outputs")
        codec: Codec[Output] = Codec(Output)
        return [_read(codec, [memoryview(part), *frames[2:]]) for part in parts.outputs]
    except (msgspec.DecodeError, IndexError, ValueError, RecursionError) as error:
        raise ProtocolError(f"it does not say whose outputs it has: {error}") from error


def _read(codec: Codec[Output], frames: Sequence[memoryview]) -> Output | Illegible:
    count = len(frames).to_bytes(4, "little")
    try:
        return codec.decode([memoryview(count), *frames])[0]
    except ProtocolError:
        return _ILLEGIBLE.decode(frames[0])
