"""Messages between a process of ours and the one with its NIXL agent. Typed, and never pickled: an
attacker at an agent's port may have taken over its process."""

import socket
from typing import Annotated, Final, Generic, TypeAlias, TypeVar

import msgspec

LARGEST: Final = 1 << 18
"""Bytes of a message: descriptions of agents are a few hundred, more with many devices."""


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The arena is registered, at an address of that process."""

    # Limited like an offer to workers: the process may have been taken over.
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=3 << 15)]
    address: Annotated[int, msgspec.Meta(ge=1)]


class Leased(msgspec.Struct, frozen=True, tag="leased"):
    """Whether reads are expected: then the agent is polled more often."""

    active: bool


class Reading(msgspec.Struct, frozen=True, tag="reading"):
    """The process that reads is ready."""


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """No agent is possible, for a reason; the process ends."""

    reason: str


class NixlPing(msgspec.Struct, frozen=True, tag="ping"):
    """Answered with :class:`NixlPong` at once."""


class NixlPong(msgspec.Struct, frozen=True, tag="pong"):
    """The process is alive."""


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Register an agent; answered with :class:`Done` or :class:`NixlFailed`."""

    number: int
    agent: str
    metadata: bytes


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Copy an agent's memory into the landing area, piece by piece. Each piece is answered with
    :class:`Done` in order, until one is answered with :class:`NixlFailed`.

    Attributes:
        number: the answers'.
        remote: address at the agent.
        offset: in the landing area.
        size: bytes.
        piece: bytes of a piece; the last one may be smaller.
    """

    number: int
    agent: str
    remote: int
    offset: int
    size: int
    piece: Annotated[int, msgspec.Meta(ge=1)]


class Disconnect(msgspec.Struct, frozen=True, tag="disconnect"):
    """Forget an agent without reads; not answered."""

    agent: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Success."""

    number: int


class NixlFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Failure; no more bytes will come."""

    number: int
    reason: str


ToServer: TypeAlias = Leased | NixlPing
FromServer: TypeAlias = Serving | Unusable | NixlPong
ToReader: TypeAlias = Connect | Read | Disconnect | NixlPing
FromReader: TypeAlias = Reading | Unusable | Done | NixlFailed | NixlPong

_Sent = TypeVar("_Sent")
_Got = TypeVar("_Got")


class Channel(Generic[_Sent, _Got]):
    """One end of a socket pair that preserves message boundaries."""

    def __init__(
        self, end: socket.socket, incoming: object, *, waits_to_send: bool = False
    ) -> None:
        """``end`` is SOCK_SEQPACKET; ``waits_to_send`` while its queue (hundreds) is full."""
        self._socket = end
        self._flags = 0 if waits_to_send else socket.MSG_DONTWAIT
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[_Got] = msgspec.msgpack.Decoder(incoming)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: _Sent) -> None:
        """Send a message. Raises OSError: the peer is gone, or its queue full (without waiting)."""
        self._socket.send(self._encoder.encode(message), self._flags)

    def receive(self) -> _Got:
        """Wait for a message. Raises EOFError, OSError: peer gone; MsgspecError: malformed."""
        data = self._socket.recv(LARGEST)
        if not data:
            raise EOFError
        try:
            return self._decoder.decode(data)
        except (UnicodeDecodeError, RecursionError) as error:  # which msgspec lets through
            raise msgspec.DecodeError(str(error)) from error

    def close(self) -> None:
        self._socket.close()
