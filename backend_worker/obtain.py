"""Getting the media of a request: by whichever transport each item came.

One :class:`MediaInlet` per session, because an arena belongs to a frontend. Knows
neither the engine nor the request plane's sockets.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from vllm.multimodal.inputs import MultiModalKwargsItem

from common.errors import ArenaUnavailableError, MediaMissingError, TransferError
from common.identity import MmHash
from common.telemetry import TRANSFER_FALLBACKS
from common.transfer.base import Received
from common.transfer.choice import ReceiverSet
from common.transfer.handshake import TransferReply, parse_offer
from common.transfer.inline import InlineReceiver
from common.transfer.metadata import decode_metadata
from common.transfer.shm import ShmReceiver

logger = logging.getLogger(__name__)


class Obtained:
    """Media that a request has in hand until the engine has taken it."""

    def __init__(self) -> None:
        self._received: dict[MmHash, Received] = {}

    @property
    def items(self) -> Mapping[MmHash, MultiModalKwargsItem]:
        """The tensors, valid until :meth:`release`."""
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

    def release(self) -> None:
        """Give all memory back. May be called more than once."""
        for received in self._received.values():
            received.release()
        self._received.clear()


class MediaInlet:
    """The transports over which one frontend can reach this worker."""

    def __init__(self, offer: bytes) -> None:
        """Try everything that the frontend offers; ``reply`` says what works.

        Raises:
            ProtocolError: the offer is malformed.
        """
        terms = parse_offer(offer)
        shm = ShmReceiver()
        self.reply = TransferReply()
        if terms.shm is not None:
            try:
                shm.attach(terms.shm)
                self.reply = TransferReply(shm=True)
            except ArenaUnavailableError as error:
                logger.info("%s", error)
                self.reply = TransferReply(shm_refusal=str(error))
        self._receivers = ReceiverSet([InlineReceiver(), shm])

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
