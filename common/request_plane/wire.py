"""Messages to ZMQ frames and back. Knows the encoding, not the sockets.

A message is its number of frames, one MessagePack frame, its tensors' frames, and for
:class:`Submit` and :class:`Supply` the frames of inline media. Frames above
:data:`MAX_FRAME_BYTES` travel in pieces. vLLM's encoder is used because messages contain vLLM's
types; its pickle fallback is refused in both directions, whatever the environment says.
"""

import asyncio
import gc
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np
import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW, MsgpackDecoder, MsgpackEncoder

from common.errors import ProtocolError
from common.request_plane.loop_socket import MAX_FRAME_BYTES, Frame

_COUNT_BYTES: Final = 4
_CUT: Final = struct.Struct("<II")  # a frame's number, and the number of its pieces
_COPIED_AT_ONCE: Final = 16  # pieces between turns of other tasks: 16 MiB take up to 60 ms


def split(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Cut the large frames of an encoded message into pieces, without a copy. The first frame then
    lists them."""
    if all(memoryview(frame).nbytes <= MAX_FRAME_BYTES for frame in frames):
        return frames
    head = bytearray(frames[0])
    parts: list[Frame] = [head]
    for number, frame in enumerate(frames[1:], 1):
        whole = memoryview(frame)
        if whole.nbytes <= MAX_FRAME_BYTES:
            parts.append(frame)
            continue
        flat = whole.cast("B")
        pieces = [flat[at : at + MAX_FRAME_BYTES] for at in range(0, len(flat), MAX_FRAME_BYTES)]
        head += _CUT.pack(number, len(pieces))
        parts += pieces
    return parts


async def join(frames: Sequence[memoryview], most: int) -> Sequence[memoryview]:
    """Put the pieces of frames together, by a copy, yielding to other tasks. Raises ProtocolError:
    malformed, or more than ``most`` bytes beside tensors."""
    if len(frames) > 1 and len(frames[1]) > most:
        raise ProtocolError(f"it has {len(frames[1])} bytes beside its tensors")
    if not frames or len(frames[0]) <= _COUNT_BYTES:
        return frames
    whole, at = [frames[0][:_COUNT_BYTES]], 1
    try:
        cuts = list(_CUT.iter_unpack(frames[0][_COUNT_BYTES:]))
    except struct.error as error:
        raise ProtocolError(f"a first frame of {len(frames[0])} bytes") from error
    for number, count in cuts:
        before = number - len(whole)
        pieces = frames[at + before : at + before + count]
        if before < 0 or count < 2 or len(pieces) < count:
            raise ProtocolError(f"frame {number} in {count} pieces")
        nbytes = sum(map(len, pieces))
        if number == 1 and nbytes > most:
            raise ProtocolError(f"it has {nbytes} bytes beside its tensors")
        whole += frames[at : at + before]
        joined = np.empty(nbytes, np.uint8).data  # in huge pages, which take a third as long
        end = 0
        for done, piece in enumerate(pieces, 1):
            start, end = end, end + len(piece)
            joined[start:end] = piece
            if done % _COPIED_AT_ONCE == 0:
                await asyncio.sleep(0)
        whole.append(joined)
        at += before + count
    return [*whole, *frames[at:]]


class About(msgspec.Struct, frozen=True):
    """Partial decode of an undecodable message: its tag and request id, empty if unknown."""

    type: str = ""
    request_id: str = ""


class _StrictEncoder(MsgpackEncoder):
    def enc_hook(self, obj: Any) -> Any:
        encoded = super().enc_hook(obj)
        if isinstance(encoded, msgspec.msgpack.Ext) and encoded.code != CUSTOM_TYPE_RAW_VIEW:
            raise TypeError(f"objects of type {type(obj).__name__} don't travel")
        return encoded


class _StrictDecoder(MsgpackDecoder):
    def ext_hook(self, code: int, data: memoryview) -> Any:
        if code != CUSTOM_TYPE_RAW_VIEW:
            raise ProtocolError(f"extension type {code} is not accepted")
        return data

    def _decode_tensor(self, arr: list[object]) -> torch.Tensor:
        # No encoder of ours sends such a tensor; PyTorch warns, once, of read-only memory.
        if isinstance(arr[2], bytes):
            raise ProtocolError("a tensor's bytes are neither a frame nor a raw view")
        return super()._decode_tensor(arr)


M = TypeVar("M")

_LARGE: Final = 64 << 10
"""Bytes of a message for which Python's collector waits: it looks through all that was decoded so
far again and again. 790,000 log probabilities in 8.7 MB take 0.8 s without it and 7.5 s with it."""


@contextmanager
def _no_collection(nbytes: int) -> Iterator[None]:
    if nbytes < _LARGE or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Codec(Generic[M]):
    """Encodes any message, decodes one direction's. Not thread-safe: one per event loop."""

    def __init__(self, incoming: Any) -> None:
        """``incoming`` is a union, such as :data:`common.request_plane.protocol.ToWorker`."""
        self._encoder = _StrictEncoder()
        self._decoder = _StrictDecoder(incoming)
        self._about = msgspec.msgpack.Decoder(About)

    def encode(self, message: msgspec.Struct, media_frames: Sequence[Frame] = ()) -> list[Frame]:
        """Encode a message, media frames last, copying no tensor. Raises ProtocolError."""
        try:
            frames: list[Frame] = list(self._encoder.encode(message))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{type(message).__name__} can't be sent: {error}") from error
        count = len(frames).to_bytes(_COUNT_BYTES, "little")
        return [count, *frames, *media_frames]

    def decode(self, frames: Sequence[memoryview]) -> tuple[M, Sequence[memoryview]]:
        """Return the message and its media frames. Raises ProtocolError: malformed."""
        if len(frames) < 2 or len(frames[0]) != _COUNT_BYTES:
            raise ProtocolError(f"{len(frames)} frames are not a message")
        count = int.from_bytes(frames[0], "little")
        if not 1 <= count < len(frames):
            raise ProtocolError(f"a message of {count} frames came in {len(frames) - 1}")
        try:
            with _no_collection(len(frames[1])):
                message: M = self._decoder.decode(frames[1 : 1 + count])
        except (
            msgspec.DecodeError,  # includes ValidationError
            AssertionError,
            AttributeError,
            IndexError,
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            RuntimeError,
            VLLMValidationError,  # of sampling parameters
        ) as error:
            raise ProtocolError(f"undecodable message: {error}") from error
        return message, frames[1 + count :]

    def about(self, frames: Sequence[memoryview]) -> About:
        """Decode the type and request id of a message that :meth:`decode` refused, if possible."""
        try:
            return self._about.decode(frames[1])
        except (msgspec.DecodeError, IndexError, ValueError, RecursionError):
            return About()
