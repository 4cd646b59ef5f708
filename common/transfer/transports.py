"""List of all transports: their ends, the choice for a worker, and what counts as a fallback.

Pure: the environment is read where the process starts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from vllm.multimodal.inputs import MultiModalKwargsItem

from common.errors import (
    ArenaFullError,
    ArenaUnavailableError,
    NoEncodedFormError,
    TransferError,
)
from common.identity import MmHash
from common.observability.telemetry import TRANSFER_FALLBACKS
from common.transfer.arena import ArenaAccess
from common.transfer.base import (
    MediaHandle,
    MediaSource,
    MmKwargsReceiver,
    MmKwargsSender,
)
from common.transfer.handshake import TransferOffer, TransferReply
from common.transfer.inline import (
    InlineReceiver,
    InlineSender,
    ReferenceReceiver,
    ReferenceSender,
    Render,
)
from common.transfer.metadata import Transport
from common.transfer.nixl import LateNixl, NixlReceiver
from common.transfer.nixl_processes import NixlNetwork
from common.transfer.shm import ShmReceiver, ShmSender


class TransferMode(Enum):
    """Operator's choice with ``DYNAMO_MM_TRANSFER``."""

    AUTO = "auto"
    SHM = "shm"
    NIXL = "nixl"
    DISABLED = "disabled"  # set with ``DYNAMO_DISABLE_NIXL_MM``: workers process media themselves


@dataclass(frozen=True)
class TransportChoice:
    """Transport to one worker. ``reason`` is a short constant for the loss of ``instead_of``, the
    preferred one; empty without a fallback."""

    transport: Transport
    instead_of: Transport | None = None
    reason: str = ""


_WANTED: Final[dict[TransferMode, tuple[Transport, ...]]] = {
    TransferMode.AUTO: ("shm", "nixl"),
    TransferMode.SHM: ("shm",),
    TransferMode.NIXL: ("nixl",),
}
"""Preferred first. Where none is proven media travel inline."""

_CERTAIN: Final[Transport] = "inline"  # reaches every worker

_FALLBACK_REASONS: Final[dict[type[TransferError], str]] = {
    ArenaFullError: "arena_full",
    ArenaUnavailableError: "arena_unavailable",
    NoEncodedFormError: "no_encoded_form",
}

_UNPROVEN: Final[dict[Transport, str]] = {"shm": "not_readable", "nixl": "not_connected"}


def wanted(mode: TransferMode) -> tuple[Transport, ...]:
    """Return a mode's transports, in order of preference."""
    return _WANTED.get(mode, ())


def indispensable(mode: TransferMode) -> tuple[Transport, ...]:
    """Return the only transport of a mode; empty if there is a choice."""
    return wanted(mode) if len(wanted(mode)) == 1 else ()


def better(mode: TransferMode, choice: TransportChoice) -> tuple[Transport, ...]:
    """Return the transports that a mode prefers to the chosen one."""
    names = wanted(mode)
    return names[: names.index(choice.transport)] if choice.transport in names else names


def choose_transport(mode: TransferMode, proven: Collection[Transport]) -> TransportChoice:
    """Choose a worker's transport among ``proven``: it has read their present probe."""
    if mode is TransferMode.DISABLED:
        return TransportChoice("reference")
    names = wanted(mode)
    chosen = next((each for each in names if each in proven), _CERTAIN)
    first = names[0]
    return (
        TransportChoice(chosen)
        if chosen == first
        else TransportChoice(chosen, first, _UNPROVEN[first])
    )


class SenderSet:
    """A frontend's senders: send each item as chosen, or inline if that fails."""

    def __init__(self, senders: Sequence[MmKwargsSender]) -> None:
        """Take one sender per transport; the inline one, as the fallback, is required."""
        self._senders: dict[Transport, MmKwargsSender] = {
            sender.transport: sender for sender in senders
        }
        self._certain = self._senders[_CERTAIN]

    @property
    def certain(self) -> TransportChoice:
        """The transport that always works."""
        return TransportChoice(self._certain.transport)

    def add(self, sender: MmKwargsSender) -> None:
        self._senders[sender.transport] = sender

    def add_offers(self, offer: TransferOffer) -> TransferOffer:
        """Add the present offers of all transports."""
        for sender in self._senders.values():
            offer = sender.add_offer(offer)
        return offer

    def proven(self, reply: TransferReply) -> list[Transport]:
        """Return the transports whose probe a worker has read, by its reply."""
        return [name for name, sender in self._senders.items() if sender.proven(reply)]

    def send(
        self, choice: TransportChoice, mm_hash: MmHash, item: MultiModalKwargsItem
    ) -> MediaHandle:
        """Send an item, or fall back; blocks. Raises UnsupportedItemError: no transport can."""
        if choice.instead_of is not None:
            TRANSFER_FALLBACKS.labels(choice.instead_of, choice.reason).inc()
        try:
            return self._senders[choice.transport].send(mm_hash, item)
        except tuple(_FALLBACK_REASONS) as error:
            TRANSFER_FALLBACKS.labels(choice.transport, _FALLBACK_REASONS[type(error)]).inc()
        return self._certain.send(mm_hash, item)

    def send_held(
        self, choice: TransportChoice, mm_hash: MmHash, source: MediaSource | None = None
    ) -> MediaHandle | None:
        """Send an item, or its encoded file, on the event loop; None if a copy is needed."""
        sender = self._senders[choice.transport]
        encoded = None if source is None else sender.send_encoded(mm_hash, source)
        handle = encoded or sender.send_held(mm_hash)
        if handle is not None and choice.instead_of is not None:
            TRANSFER_FALLBACKS.labels(choice.instead_of, choice.reason).inc()
        return handle

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()


def senders(arena: ArenaAccess | None, mode: TransferMode) -> list[MmKwargsSender]:
    """Return a frontend's senders that start at no cost; without an arena only inline ones."""
    ends: list[MmKwargsSender] = [InlineSender(), ReferenceSender()]
    if arena is not None and "shm" in wanted(mode):
        ends.append(ShmSender(arena))
    return ends


def late_senders(
    arena: ArenaAccess | None, mode: TransferMode, network: NixlNetwork
) -> list[LateNixl]:
    """Return a frontend's senders that start once a worker needs them."""
    return [LateNixl(arena, network)] if arena is not None and "nixl" in wanted(mode) else []


def receivers(render: Render, nixl: NixlReceiver | None = None) -> list[MmKwargsReceiver[Any]]:
    """Return a worker's receivers, in the order in which it tries offers."""
    own = [] if nixl is None else [nixl]
    return [InlineReceiver(), ReferenceReceiver(render), ShmReceiver(), *own]
