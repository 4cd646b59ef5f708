"""Every transport that processes of ours use: which ends it has, which one takes an item to a
worker, and what counts as a fallback.

The one place that lists them. Pure: the environment is read where the process starts.
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
    """What the operator asked for with ``DYNAMO_MM_TRANSFER``."""

    AUTO = "auto"
    SHM = "shm"
    NIXL = "nixl"
    DISABLED = "disabled"  # set with ``DYNAMO_DISABLE_NIXL_MM``: workers process media themselves


@dataclass(frozen=True)
class TransportChoice:
    """How items travel to one worker.

    Attributes:
        instead_of: the way that was preferred, if it can't be had.
        reason: short constant that says why; empty if nothing was given up.
    """

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
    """The transports that a mode would have, those preferred first."""
    return _WANTED.get(mode, ())


def indispensable(mode: TransferMode) -> tuple[Transport, ...]:
    """The transport without which a mode means nothing; none if there is a choice."""
    return wanted(mode) if len(wanted(mode)) == 1 else ()


def better(mode: TransferMode, choice: TransportChoice) -> tuple[Transport, ...]:
    """The transports that a mode prefers to what was chosen."""
    names = wanted(mode)
    return names[: names.index(choice.transport)] if choice.transport in names else names


def choose_transport(mode: TransferMode, proven: Collection[Transport]) -> TransportChoice:
    """Pick the transport for one worker, which has proven some: it has read their probe as it is
    now."""
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
    """A frontend's senders. Sends each item as chosen, or inline when that fails."""

    def __init__(self, senders: Sequence[MmKwargsSender]) -> None:
        """
        Args:
            senders: one of each transport in use; the inline one must be among them, to which
                everything falls back.
        """
        self._senders: dict[Transport, MmKwargsSender] = {
            sender.transport: sender for sender in senders
        }
        self._certain = self._senders[_CERTAIN]

    @property
    def certain(self) -> TransportChoice:
        """What always works."""
        return TransportChoice(self._certain.transport)

    def add(self, sender: MmKwargsSender) -> None:
        self._senders[sender.transport] = sender

    def add_offers(self, offer: TransferOffer) -> TransferOffer:
        """The offer with what every transport offers now."""
        for sender in self._senders.values():
            offer = sender.add_offer(offer)
        return offer

    def proven(self, reply: TransferReply) -> list[Transport]:
        """By which transports a worker has read the probe, as it says."""
        return [name for name, sender in self._senders.items() if sender.proven(reply)]

    def send(
        self, choice: TransportChoice, mm_hash: MmHash, item: MultiModalKwargsItem
    ) -> MediaHandle:
        """Send an item; blocks as :meth:`MmKwargsSender.send` does. A fallback is no error.

        Raises UnsupportedItemError: the item can't be sent by any transport.
        """
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
        """Send an item that needs no copy, on the event loop, or the medium before processing if
        that stands for it; None if it needs one."""
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
    """A frontend's ends that cost nothing to have; without an arena all is sent inline."""
    ends: list[MmKwargsSender] = [InlineSender(), ReferenceSender()]
    if arena is not None and "shm" in wanted(mode):
        ends.append(ShmSender(arena))
    return ends


def late_senders(
    arena: ArenaAccess | None, mode: TransferMode, network: NixlNetwork
) -> list[LateNixl]:
    """A frontend's ends that are started once a worker needs them."""
    return [LateNixl(arena, network)] if arena is not None and "nixl" in wanted(mode) else []


def receivers(render: Render, nixl: NixlReceiver | None = None) -> list[MmKwargsReceiver[Any]]:
    """A worker's ends, in the order in which it tries what is offered."""
    own = [] if nixl is None else [nixl]
    return [InlineReceiver(), ReferenceReceiver(render), ShmReceiver(), *own]
