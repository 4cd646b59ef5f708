"""Messages to ZMQ frames and back. Knows the encoding, not the sockets.

A message is one MessagePack frame, then its tensors' frames, and for :class:`Submit` and
:class:`Supply` the frames of inline media. vLLM's encoder is used because messages contain vLLM's
types; its pickle fallback is refused in both directions, whatever the environment says.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import msgspec
import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW, MsgpackDecoder, MsgpackEncoder

from common.errors import ProtocolError
from common.request_plane.loop_socket import Frame


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
        count = len(frames).to_bytes(4, "little")
        return [count, *frames, *media_frames]

    def decode(self, frames: Sequence[memoryview]) -> tuple[M, Sequence[memoryview]]:
        """Return the message and its media frames. Raises ProtocolError: malformed."""
        if len(frames) < 2 or len(frames[0]) != 4:
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
