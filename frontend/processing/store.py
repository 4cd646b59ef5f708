"""Processed media kept for later requests.

With an arena, that is the store: an item is written once, requests and workers read it in place,
and items neither leased nor in use may be evicted.
"""

import ctypes
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

from vllm.multimodal.cache.base import MultiModalCache, MultiModalProcessorCacheItem
from vllm.multimodal.processing.processor import ResolvedPromptUpdate

from common.errors import ArenaFullError, ArenaUnavailableError, UnsupportedItemError
from common.identity import MmHash
from common.transfer.arena import ArenaAccess, Lease, ReservedSegment, SegmentLayout
from common.transfer.codec import decode, encode
from common.transfer.shared_arena import MediaClaims, SharedArena
from frontend.processing.batch import Processed


class ProcessedStore(ABC):
    """Store of processed media. Thread-safe."""

    @abstractmethod
    def get(self, mm_hash: MmHash) -> Processed | None:
        """Return an item, if kept; it stays usable while referenced. May ask another process: not
        on an event loop.
        """

    def get_now(self, mm_hash: MmHash) -> Processed | None:
        """Return an item without asking another process, for an event loop."""
        return self.get(mm_hash)

    @abstractmethod
    def put(self, processed: Processed) -> Processed:
        """Keep an item if there is room; return it as kept. May copy it."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all items."""


class ArenaStore(ProcessedStore):
    """Items in shared memory, which workers read too."""

    def __init__(self, arena: ArenaAccess) -> None:
        self._arena = arena
        self.directory = MediaClaims(arena) if isinstance(arena, SharedArena) else None
        """Directory shared by the processes of one arena; None if the arena is private."""

    def get(self, mm_hash: MmHash) -> Processed | None:
        return self._kept(self._arena.lease(mm_hash))

    def get_now(self, mm_hash: MmHash) -> Processed | None:
        return self._kept(self._arena.lease_now(mm_hash))

    def _kept(self, lease: Lease | None) -> Processed | None:
        if lease is None:
            return None
        if lease.note is None:  # written by a sender, without prompt updates
            lease.release()
            return None
        return self.view(lease)

    def put(self, processed: Processed) -> Processed:
        try:
            encoded = encode(processed.item)
            lease = self._arena.put(processed.mm_hash, encoded, processed.prompt_updates)
        except (ArenaFullError, ArenaUnavailableError, UnsupportedItemError):
            return processed  # for this request only
        return self.view(lease)

    def reserve(self, mm_hash: MmHash, layout: SegmentLayout) -> ReservedSegment | Lease | None:
        """Return room for an item that another process writes, the item itself if kept, or None if
        the arena is full. Waits for a process that is writing it.
        """
        try:
            return self._arena.reserve(mm_hash, layout)
        except (ArenaFullError, ArenaUnavailableError):
            return None

    def view(self, lease: Lease) -> Processed:
        """Return an item over the arena's memory; the lease ends with its last tensor."""
        owner = (ctypes.c_char * lease.layout.length).from_buffer(self._arena.memory, lease.offset)
        weakref.finalize(owner, lease.release_soon).atexit = False
        envelope, buffers = lease.layout.split(memoryview(owner).cast("B"))
        updates = cast(Sequence[ResolvedPromptUpdate], lease.note)
        return Processed(lease.mm_hash, decode(envelope, buffers), updates)

    def clear(self) -> None:
        self._arena.drop_notes()


class PrivateStore(ProcessedStore):
    """LRU cache of ``budget_gib`` GiB in this process's own memory."""

    def __init__(self, budget_gib: float) -> None:
        self._lock = threading.Lock()
        self._cache = MultiModalCache.get_lru_cache(budget_gib, MultiModalProcessorCacheItem)

    def get(self, mm_hash: MmHash) -> Processed | None:
        with self._lock:
            kept = self._cache.get(mm_hash)
        return None if kept is None else Processed(mm_hash, kept.item, kept.prompt_updates)

    def put(self, processed: Processed) -> Processed:
        kept = MultiModalProcessorCacheItem(processed.item, processed.prompt_updates)
        with self._lock:
            self._cache.put_if_fits(processed.mm_hash, kept)
        return processed

    def clear(self) -> None:
        with self._lock:
            self._cache.clear()
