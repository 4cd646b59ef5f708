"""Framed messages between processes of ours, on a private socket pair, with numbered answers.

A frame is a length and msgpack. A socket pair has no name in a file system or network, so only the
two processes reach it: messages come from the same program of the same user.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Final, Generic, TypeVar, cast

import msgspec

LARGEST: Final = 64 << 20  # bytes of a message. A page of metrics has a few hundred kilobytes

_HEAD: Final = struct.Struct("<I")
_encoder: Final = msgspec.msgpack.Encoder()

Got = TypeVar("Got")


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return _HEAD.pack(len(body)) + body


class Frames(Generic[Got]):
    """Decoder of a stream of messages."""

    def __init__(self, kind: object) -> None:
        """Take the type of the messages."""
        self._decoder: msgspec.msgpack.Decoder[Got] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Got]:
        """Yield the messages that are complete now. Raises msgspec.MsgspecError."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            if length > LARGEST:
                raise msgspec.DecodeError(f"a message of {length} bytes")
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_HEAD.size : end])
            del self._buffer[:end]
            yield self._decoder.decode(body)


class FrameProtocol(asyncio.Protocol, Generic[Got]):
    """One end of a socket pair on an event loop."""

    def __init__(
        self, kind: object, on_message: Callable[[Got], None], on_lost: Callable[[], None]
    ) -> None:
        """``on_lost`` is called once, when the peer is gone or sent malformed data."""
        self._frames: Frames[Got] = Frames(kind)
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport inherits from no asyncio class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except msgspec.MsgspecError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def send(self, message: msgspec.Struct) -> None:
        """Send without waiting for the peer to read; do nothing if it is gone."""
        if self._transport is not None:
            self._transport.write(frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


T = TypeVar("T")


class PendingCalls(Generic[T]):
    """Pending calls of one kind, by number. Answers to unknown numbers are dropped."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[T]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, send: Callable[[int], Awaitable[None]]) -> T:
        """Send a call with its number and await the answer, without a time limit. Cancelling leaves
        nothing behind. Raises the errors of ``send``."""
        number = next(self._numbers)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await send(number)
            return await answer
        finally:
            del self._waiting[number]

    def answered(self, number: int, answer: T) -> None:
        """Complete a call, if it is still pending."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail all pending calls."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error())
