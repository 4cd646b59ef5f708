"""Same host: the worker maps the frontend's arena and builds tensors over it, without a copy.

Also the sender base class of all arena transports: write once, lease often.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from vllm.multimodal.inputs import MultiModalKwargsItem

from common.aio.supervised import note_failure
from common.errors import ArenaUnavailableError
from common.identity import MmHash
from common.observability.telemetry import INTERNAL_ERRORS
from common.transfer.arena import (
    HEADER_SIZE,
    SEGMENT_ALIGNMENT,
    ArenaAccess,
    ArenaMapping,
    ArenaOffer,
    Lease,
    aligned,
    check_envelope,
    check_header,
    reap_orphans,
)
from common.transfer.base import (
    Accepted,
    Attachment,
    Attachments,
    MediaHandle,
    MmKwargsReceiver,
    MmKwargsSender,
    Received,
)
from common.transfer.codec import decode, encode
from common.transfer.handshake import TransferOffer, TransferReply
from common.transfer.metadata import ShmMetadata, TransferMetadata, Transport
from common.transfer.pages import PrivatePages


class ArenaSender(MmKwargsSender):
    """Sends from an arena, which other senders may share and the caller closes."""

    def __init__(self, arena: ArenaAccess) -> None:
        super().__init__()
        self.arena = arena

    def _send(self, mm_hash: MmHash, item: MultiModalKwargsItem) -> MediaHandle:
        # An item in the arena needn't even be encoded.
        lease = self.arena.lease(mm_hash) or self.arena.put(mm_hash, encode(item))
        return self._handle(lease)

    def send_held(self, mm_hash: MmHash) -> MediaHandle | None:
        lease = self.arena.lease_now(mm_hash)
        return None if lease is None else self._handle(lease)

    def _handle(self, lease: Lease) -> MediaHandle:
        return MediaHandle(self._describe(lease), on_release=lease.release)

    @abstractmethod
    def _describe(self, lease: Lease) -> TransferMetadata:
        """Return the metadata by which the worker's end finds the segment."""


class ShmSender(ArenaSender):
    """Leases segments of an arena to workers that have it mapped."""

    transport: ClassVar[Transport] = "shm"

    def add_offer(self, offer: TransferOffer) -> TransferOffer:
        return offer.model_copy(update={"shm": self.arena.offer})

    def proven(self, reply: TransferReply) -> bool:
        return reply.shm

    def _describe(self, lease: Lease) -> ShmMetadata:
        return ShmMetadata(
            mm_hash=lease.mm_hash,
            envelope_size=lease.layout.envelope_size,
            buffer_sizes=lease.layout.buffer_sizes,
            arena=self.arena.offer.name,
            offset=lease.offset,
            generation=lease.generation,
        )


class ShmReceiver(MmKwargsReceiver[ShmMetadata]):
    """Maps each frontend's arena once."""

    transport: ClassVar[Transport] = "shm"
    metadata_type = ShmMetadata

    def __init__(self) -> None:
        super().__init__()
        self._mappings: dict[str, ArenaMapping] = {}
        self._attachments = Attachments(self._unmap)
        self._pages = PrivatePages()

    async def accept(self, offer: TransferOffer, reply: TransferReply) -> Accepted | None:
        if offer.shm is None:
            return None
        attachment = await self.attach(offer.shm)
        return Accepted(reply.model_copy(update={"shm": True}), attachment)

    async def attach(self, offer: ArenaOffer) -> Attachment:
        """Map a frontend's arena until all attachments are detached. Cancelling leaves nothing
        behind. Raises ArenaUnavailableError: it can't be read here; another transport may."""
        if not self._is_mapped(offer):
            mapping = await asyncio.to_thread(ArenaMapping.open, offer)
            if not self._is_mapped(offer):  # no other task was faster
                self._mappings[offer.name] = mapping
        return self._attachments.add(offer.name)

    def mapping(self, name: str) -> ArenaMapping:
        """Return a frontend's arena. Raises ArenaUnavailableError: it isn't mapped here."""
        mapping = self._mappings.get(name)
        if mapping is None:
            raise ArenaUnavailableError(f"the arena {name} isn't mapped here")
        return mapping

    def _is_mapped(self, offer: ArenaOffer) -> bool:
        mapping = self._mappings.get(offer.name)
        return mapping is not None and mapping.offer == offer

    def _unmap(self, name: str) -> None:
        self._mappings.pop(name, None)
        # The frontend may have been killed, and none may start on this host again.
        reaping = asyncio.get_running_loop().run_in_executor(None, reap_orphans)
        reaping.add_done_callback(partial(note_failure, "reap_orphans"))

    async def _receive(self, metadata: ShmMetadata, frames: Sequence[memoryview]) -> Received:
        mapping = self.mapping(metadata.arena)
        layout = metadata.layout
        segment = mapping.segment(metadata.offset, layout.length)

        def check(header: bytes) -> int:
            return check_header(
                header, mapping.offer.key, metadata.generation, metadata.mm_hash, layout
            )

        header = bytes(segment[:HEADER_SIZE])
        envelope_crc = check(header)

        def verify() -> None:
            now = bytes(segment[:HEADER_SIZE])
            if now != header:
                check(now)

        envelope_view, buffers = layout.split(segment)
        # Its own copy, since it is parsed after the check.
        envelope = bytes(envelope_view)
        try:
            check_envelope(envelope, envelope_crc, metadata.mm_hash)
            item = decode(envelope, buffers)
        finally:
            # Either all reads above saw this generation, or this raises StaleSegmentError.
            verify()

        # Whole pages: the rest of the last one belongs to the segment too.
        whole = mapping.segment(metadata.offset, aligned(layout.length, SEGMENT_ALIGNMENT))

        def restore() -> None:
            if restored := self._pages.restore(whole):
                INTERNAL_ERRORS.labels("arena_pages").inc(restored)

        return Received(
            metadata.mm_hash, item, verify=verify, on_release=restore, checked=whole.nbytes
        )

    async def close(self) -> None:
        self._mappings.clear()
        self._pages.close()
