"""Getting the media of a request: by whichever transport each item came.

Knows neither the engine nor the request plane's sockets.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from vllm.multimodal.inputs import MultiModalKwargsItem

from common.errors import ArenaUnavailableError, MediaMissingError, TransferError
from common.identity import MmHash
from common.telemetry import TRANSFER_FALLBACKS
from common.transfer.base import Received
from common.transfer.choice import ReceiverSet
from common.transfer.handshake import TransferOffer, TransferReply
from common.transfer.inline import InlineReceiver
from common.transfer.metadata import decode_metadata
from common.transfer.nixl import NixlReceiver
from common.transfer.reference import ReferenceReceiver, Render
from common.transfer.shm import ShmReceiver

logger = logging.getLogger(__name__)


_RELEASED_AT_ONCE: Final = 16 << 20
"""Bytes to look through on the event loop: a quarter of a millisecond."""


class Obtained:
    """Media that a request has in hand until the engine has taken it."""

    def __init__(self) -> None:
        self._received: dict[MmHash, Received] = {}

    @property
    def items(self) -> Mapping[MmHash, MultiModalKwargsItem]:
        """The tensors, valid until :meth:`give_back`."""
        return {mm_hash: received.item for mm_hash, received in self._received.items()}

    def add(self, received: Received) -> None:
        """Keep an item; another of that hash is released."""
        if previous := self._received.pop(received.mm_hash, None):
            previous.release()
        self._received[received.mm_hash] = received

    def verify(self) -> None:
        """Check, once the engine has taken the tensors, that they were still ours.

        Raises:
            StaleSegmentError: the engine may have taken another item's bytes.
        """
        for received in self._received.values():
            received.verify()

    async def give_back(self) -> None:
        """Give all memory back, in a thread if that takes long. May be called more than once."""
        received = list(self._received.values())
        self._received.clear()
        if sum(each.checked for each in received) > _RELEASED_AT_ONCE:
            await asyncio.to_thread(_release, received)
        else:
            _release(received)


def _release(received: Sequence[Received]) -> None:
    for each in received:
        each.release()


class MediaInlet:
    """The transports by which frontends can reach this worker."""

    def __init__(self, nixl: NixlReceiver | None, render: Render) -> None:
        """
        Args:
            render: processes a medium that was not transferred.
            nixl: made at start-up, or None if this worker has no NIXL.
        """
        self._shm = ShmReceiver()
        self._nixl = nixl
        own = [] if nixl is None else [nixl]
        self._receivers = ReceiverSet(
            [InlineReceiver(), ReferenceReceiver(render), self._shm, *own]
        )

    async def attach(self, offer: TransferOffer) -> TransferReply:
        """Try what a frontend offers, in its order; the first that works is used.

        Cancelling it leaves at most a mapping that :meth:`detach` removes.
        """
        refusals: list[str] = []
        if offer.shm is not None:
            try:
                await asyncio.to_thread(self._shm.attach, offer.shm)
                return TransferReply(shm=True)
            except ArenaUnavailableError as error:
                refusals.append(str(error))
        if offer.nixl is not None:
            try:
                if self._nixl is None:
                    raise ArenaUnavailableError("this worker runs without NIXL")
                await self._nixl.attach(offer.nixl)
                return TransferReply(nixl=True, refusals=tuple(refusals))
            except TransferError as error:
                refusals.append(str(error))
        return TransferReply(refusals=tuple(refusals))

    def detach(self, offer: TransferOffer) -> None:
        """A frontend left. Items received from it stay usable."""
        if offer.shm is not None:
            self._shm.detach(offer.shm.name)
        if offer.nixl is not None and self._nixl is not None:
            self._nixl.detach(offer.nixl.agent)

    async def obtain(
        self, shipments: Sequence[bytes], frames: Sequence[memoryview], into: Obtained
    ) -> None:
        """Receive every shipped item, side by side.

        Args:
            shipments: transfer metadata, one per item.
            frames: media frames of the message that brought them.
            into: gets what could be received, also when others fail.

        Raises:
            CorruptSegmentError: some metadata is malformed, so it names no item.
            MediaMissingError: names the items that did not arrive and the first
                reason. Cancellation leaves nothing behind but what is in ``into``.
        """
        failed: dict[MmHash, TransferError] = {}

        async def receive(shipment: bytes) -> None:
            metadata = decode_metadata(shipment)
            try:
                into.add(await self._receivers.receive(metadata, frames))
            except TransferError as error:
                TRANSFER_FALLBACKS.labels(metadata.transport, type(error).__name__).inc()
                logger.warning("media item not received: %s", error)
                failed[metadata.mm_hash] = error

        async with asyncio.TaskGroup() as group:
            for shipment in shipments:
                group.create_task(receive(shipment))
        if failed:
            raise MediaMissingError(failed, type(next(iter(failed.values()))).__name__)

    async def close(self) -> None:
        """Unmap everything. Tensors still in use stay valid."""
        await self._receivers.close()
