"""A transport within one process, complete but for shared memory, that can be told to fail.

It describes items as shared memory does: the offset is the slot.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

from vllm.multimodal.inputs import MultiModalKwargsItem

from common.errors import ArenaFullError, CorruptSegmentError, StaleSegmentError, TransferError
from common.identity import MmHash
from common.transfer.base import MediaHandle, MmKwargsReceiver, MmKwargsSender, Received
from common.transfer.codec import decode, encode
from common.transfer.metadata import ShmMetadata, Transport


class MemoryStore:
    """Where the two ends of the in-memory transport meet.

    Attributes:
        capacity: bytes it may hold; beyond that a send is refused.
        fail_next: errors that the next receives raise, one each.
        truncate_next: how many of the next receives find their last buffer cut short.
        received: hashes of the items that were received, in order.
        unreleased: items that were received and not given back.
    """

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.fail_next: list[TransferError] = []
        self.truncate_next = 0
        self.received: list[MmHash] = []
        self.unreleased = 0
        self._slots: dict[int, list[bytes]] = {}
        self._next_slot = 0

    @property
    def held(self) -> int:
        """Bytes that are leased."""
        return sum(len(part) for parts in self._slots.values() for part in parts)

    def reclaim(self) -> None:
        """Make every handle that is out go stale."""
        self._slots.clear()

    def add(self, parts: list[bytes]) -> int:
        """Keep envelope and buffers; gives the slot."""
        if self.held + sum(map(len, parts)) > self.capacity:
            raise ArenaFullError(f"{self.held} of {self.capacity} bytes are leased")
        slot = self._next_slot
        self._next_slot += 1
        self._slots[slot] = parts
        return slot

    def get(self, slot: int) -> list[bytes]:
        """Envelope and buffers, or the failure that a test asked for."""
        if self.fail_next:
            raise self.fail_next.pop(0)
        if slot not in self._slots:
            raise StaleSegmentError(f"slot {slot} was reclaimed")
        parts = self._slots[slot]
        if self.truncate_next:
            self.truncate_next -= 1
            parts = [*parts[:-1], parts[-1][:-1]]
        return parts

    def remover(self, slot: int) -> Callable[[], None]:
        """A function that frees the slot."""
        return lambda: (self._slots.pop(slot, None), None)[1]


class MemorySender(MmKwargsSender):
    """Copies items into a :class:`MemoryStore`."""

    transport: ClassVar[Transport] = "shm"

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store

    def _send(self, mm_hash: MmHash, item: MultiModalKwargsItem) -> MediaHandle:
        encoded = encode(item)
        slot = self._store.add([encoded.envelope, *map(bytes, encoded.buffers)])
        metadata = ShmMetadata(
            mm_hash=mm_hash,
            envelope_size=len(encoded.envelope),
            buffer_sizes=tuple(buffer.nbytes for buffer in encoded.buffers),
            arena="memory",
            offset=slot,
            generation=0,
        )
        return MediaHandle(metadata, on_release=self._store.remover(slot))

    def close(self) -> None:
        self._store.reclaim()


class MemoryReceiver(MmKwargsReceiver[ShmMetadata]):
    """Copies items out of a :class:`MemoryStore`."""

    transport: ClassVar[Transport] = "shm"
    metadata_type = ShmMetadata

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store

    async def _receive(self, metadata: ShmMetadata, frames: Sequence[memoryview]) -> Received:
        envelope, *buffers = self._store.get(metadata.offset)
        sizes = (len(envelope), tuple(map(len, buffers)))
        if sizes != (metadata.envelope_size, metadata.buffer_sizes):
            raise CorruptSegmentError(f"slot {metadata.offset} holds other sizes: {sizes}")
        item = decode(envelope, [memoryview(bytearray(buffer)) for buffer in buffers])
        self._store.received.append(metadata.mm_hash)
        self._store.unreleased += 1
        return Received(metadata.mm_hash, item, on_release=self._released)

    def _released(self) -> None:
        self._store.unreleased -= 1

    async def close(self) -> None:
        """Nothing to free."""
