"""Memory for items received over NIXL, until their requests release them."""

import asyncio
import fcntl
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from common.aio.cleanup import Released, undo_on_error
from common.transfer import pages
from common.transfer.arena import SEGMENT_ALIGNMENT, SegmentTable, aligned
from common.transfer.checksum import PIECE


class Room(Released):
    """Memory of one item, page-aligned. ``offset`` is in the landing area; None if elsewhere."""

    def __init__(
        self, memory: memoryview, offset: int | None, give_back: Callable[[], None]
    ) -> None:
        self.memory = memory
        self.offset = offset
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Free the memory, from any thread. It must not be written or viewed any more."""
        give_back, self._give_back = self._give_back, None
        self.memory = memoryview(b"")
        if give_back is not None:
            give_back()


class Rooms:
    """Allocator of items' memory. Thread-safe."""

    def __init__(self, memory: memoryview, landing_offset: int | None = None) -> None:
        """
        Args:
            memory: page-aligned and prefaulted: page faults of many threads at once would stall the
                event loop for tens of milliseconds.
            landing_offset: its start in the landing area, if it is there.
        """
        self._memory = memory
        self._landing_offset = landing_offset
        self._table = SegmentTable(memory.nbytes)
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return self._table.free_bytes

    def take(self, size: int) -> Room | None:
        """Allocate ``size`` bytes for an item; None if there is no room now."""
        with self._lock:
            placement = self._table.place(size)
        if placement is None:
            return None
        block = placement.block

        def give_back() -> None:
            with self._lock:
                self._table.discard(block)

        start = block.offset
        offset = None if self._landing_offset is None else self._landing_offset + start
        return Room(self._memory[start : start + size], offset, give_back)


def touched_memory(size: int) -> memoryview:
    """Return prefaulted private memory. Takes about 0.1 s per GB, without the GIL."""
    memory = pages.private_memory(aligned(size, SEGMENT_ALIGNMENT))
    pages.populate(memory, for_writing=True)
    return memory


class LandingArea:
    """Slots of one piece for reads, and room for whole items. For use on the event loop.

    Each process gets an area of its own: a replaced process that still runs writes to no later
    area, and items stay valid while they are held.

    Attributes:
        size: bytes.
        memory: the whole area. Other processes may write to it at any time.
        descriptor: for the reading process; its starter closes it.
        rooms: for items that are used in place.
    """

    def __init__(self, slots: int, for_items: int) -> None:
        """Allocate ``slots`` (at least 1) for concurrent reads, and ``for_items`` bytes of whole
        pages. Raises OSError: there is not enough memory."""
        self.size = area_size(slots, for_items)
        self._given_back_at = time.monotonic()
        self._waiting: deque[asyncio.Future[int]] = deque()
        self.descriptor = os.memfd_create("mmrouter-nixl", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        with undo_on_error(lambda: os.close(self.descriptor)):
            os.ftruncate(self.descriptor, self.size)
            # A compromised reading process could otherwise kill this one with SIGBUS.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self.memory = memoryview(mmap.mmap(self.descriptor, self.size))
        pages.populate(self.memory, for_writing=True)
        self._free = deque(range(0, slots * PIECE, PIECE))
        self.rooms = Rooms(self.memory[slots * PIECE :], landing_offset=slots * PIECE)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def stuck_for(self) -> float:
        """Seconds for which all slots have been in use without a release."""
        return 0.0 if self._free else time.monotonic() - self._given_back_at

    async def take(self) -> int:
        """Return the offset of a slot; waits for one."""
        if self._free:
            return self._free.popleft()
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(waiter.result())
            raise

    def give_back(self, slot: int) -> None:
        """Release a slot that no read writes to."""
        self._given_back_at = time.monotonic()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self._free.append(slot)


def area_size(slots: int, for_items: int) -> int:
    return slots * PIECE + for_items
