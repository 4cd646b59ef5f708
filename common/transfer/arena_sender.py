"""What the senders of all arena-backed transports share: write once, lease often."""

from abc import abstractmethod

from vllm.multimodal.inputs import MultiModalKwargsItem

from common.identity import MmHash
from common.transfer.arena import ArenaAccess, Lease
from common.transfer.base import MediaHandle, MmKwargsSender, SentHook
from common.transfer.codec import encode
from common.transfer.metadata import TransferMetadata


class ArenaSender(MmKwargsSender):
    """Sends from an arena, which other senders may share and somebody else closes.

    Attributes:
        arena: where items lie.
    """

    def __init__(self, arena: ArenaAccess, *, on_sent: SentHook | None = None) -> None:
        super().__init__(on_sent=on_sent)
        self.arena = arena

    def _send(self, mm_hash: MmHash, item: MultiModalKwargsItem) -> MediaHandle:
        # An item that is there needn't even be encoded.
        lease = self.arena.lease(mm_hash) or self.arena.put(mm_hash, encode(item))
        return self._handle(lease)

    def _send_held(self, mm_hash: MmHash) -> MediaHandle | None:
        lease = self.arena.lease_now(mm_hash)
        return None if lease is None else self._handle(lease)

    def _handle(self, lease: Lease) -> MediaHandle:
        return MediaHandle(self._describe(lease), on_release=lease.release)

    @abstractmethod
    def _describe(self, lease: Lease) -> TransferMetadata:
        """Metadata by which the worker's end of this transport finds the segment."""

    def close(self) -> None:
        """Nothing to free: the arena has its own owner."""
