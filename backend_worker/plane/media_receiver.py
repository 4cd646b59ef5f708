"""Receive the media of a request, by each item's transport. Knows neither the engine nor the
request plane's sockets."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm.multimodal.inputs import MultiModalKwargsItem

from common.errors import (
    ArenaUnavailableError,
    ConfigurationError,
    MediaMissingError,
    TransferError,
)
from common.identity import MmHash
from common.observability.telemetry import TRANSFER_FALLBACKS
from common.transfer.base import Attachment, MmKwargsReceiver, Received
from common.transfer.handshake import TransferOffer, TransferReply, namespace
from common.transfer.metadata import TransferMetadata, decode_metadata

logger = logging.getLogger(__name__)

_RELEASED_AT_ONCE: Final = 16 << 20
"""Bytes to look through on the event loop: a quarter of a millisecond."""

_DECODED_AT_ONCE: Final = 16
"""Descriptions of items, which may have a megabyte each, between two turns of other tasks."""


class ReceivedMedia:
    """Received media that a request owns until the engine has taken them."""

    def __init__(self) -> None:
        self._received: dict[MmHash, Received] = {}

    @property
    def items(self) -> Mapping[MmHash, MultiModalKwargsItem]:
        """Tensors, valid until :meth:`give_back`."""
        return {mm_hash: received.item for mm_hash, received in self._received.items()}

    def add(self, received: Received) -> None:
        """Add an item; release an earlier one of the same hash."""
        if previous := self._received.pop(received.mm_hash, None):
            previous.release()
        self._received[received.mm_hash] = received

    def verify(self) -> None:
        """Check, once the engine has taken the tensors, that their memory was still ours. Raises
        StaleSegmentError: the engine may have taken another item's bytes."""
        for received in self._received.values():
            received.verify()

    async def give_back(self) -> None:
        """Release all memory, in a thread if that takes long. May be called more than once."""
        received = list(self._received.values())
        self._received.clear()
        if sum(each.checked for each in received) > _RELEASED_AT_ONCE:
            await asyncio.to_thread(_release, received)
        else:
            _release(received)


def _release(received: Sequence[Received]) -> None:
    for each in received:
        each.release()


class MediaReceiver:
    """Transports by which frontends can reach this worker."""

    def __init__(self, receivers: Sequence[MmKwargsReceiver[Any]]) -> None:
        """Take one receiver per transport, in the order in which offers are tried."""
        self._ends = {receiver.transport: receiver for receiver in receivers}

    def terms(self, offer: TransferOffer) -> TransferReply:
        """Return the reply to an offer before any part of it was tried."""
        reply = TransferReply(
            same_ipc=offer.ipc == namespace("ipc") != "",
            same_loopback=offer.loopback == namespace("net") != "",
        )
        for end in self._ends.values():
            reply = end.add_prospects(reply)
        return reply

    async def attach(self, offer: TransferOffer) -> tuple[TransferReply, Attachment]:
        """Try a frontend's offer in our order and use the first transport that works. Cancelling
        leaves nothing behind. Returns the reply, and the session's hold on the frontend's memory,
        to be detached once the session and its requests have ended."""
        terms = self.terms(offer)
        refusals: list[str] = []
        for end in self._ends.values():
            try:
                accepted = await end.accept(offer, terms)
            except (TransferError, ConfigurationError) as error:
                refusals.append(str(error))
                continue
            if accepted is not None:
                reply = accepted.reply.model_copy(update={"refusals": tuple(refusals)})
                return reply, accepted.attachment
        missing = [each for each in offer.transports if each not in self._ends]
        refusals += [f"this worker runs without {name.upper()}" for name in missing]
        refusals += filter(None, (end.obstacle(terms) for end in self._ends.values()))
        return terms.model_copy(update={"refusals": tuple(refusals)}), Attachment()

    async def receive(
        self, shipments: Sequence[bytes], frames: Sequence[memoryview], into: ReceivedMedia
    ) -> None:
        """Receive all shipped items concurrently into ``into``.

        Items received so far are kept if others fail, or on cancellation.

        Raises:
            CorruptSegmentError: metadata is malformed, so it names no item.
            MediaMissingError: names the items that did not arrive, and the first reason.
        """
        failed: dict[MmHash, TransferError] = {}
        described: list[TransferMetadata] = []
        for shipment in shipments:
            described.append(decode_metadata(shipment))
            if len(described) % _DECODED_AT_ONCE == 0:
                await asyncio.sleep(0)

        async def receive(metadata: TransferMetadata) -> None:
            try:
                end = self._ends.get(metadata.transport)
                if end is None:
                    raise ArenaUnavailableError(f"this worker has no {metadata.transport}")
                into.add(await end.receive(metadata, frames))
            except TransferError as error:
                TRANSFER_FALLBACKS.labels(metadata.transport, type(error).__name__).inc()
                logger.warning("media item not received: %s", error)
                failed[metadata.mm_hash] = error

        async with asyncio.TaskGroup() as group:
            for metadata in described:
                group.create_task(receive(metadata))
        if failed:
            raise MediaMissingError(failed, type(next(iter(failed.values()))).__name__)

    async def close(self) -> None:
        """Unmap everything. Tensors still in use stay valid."""
        for end in self._ends.values():
            await end.close()
