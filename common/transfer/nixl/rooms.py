"""Memory in which items that came over NIXL lie until their requests give them back."""

import threading
from collections.abc import Callable

from common.aio.cleanup import Released
from common.transfer import pages
from common.transfer.arena import SEGMENT_ALIGNMENT, SegmentTable, aligned


class Room(Released):
    """Memory of one item.

    Attributes:
        memory: page-aligned, as long as the item.
        offset: of it in the landing area; None if it lies elsewhere.
    """

    def __init__(
        self, memory: memoryview, offset: int | None, give_back: Callable[[], None]
    ) -> None:
        self.memory = memory
        self.offset = offset
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Give the memory to others, from any thread: nothing may be read to it any more, and
        nobody may look at it.
        """
        give_back, self._give_back = self._give_back, None
        self.memory = memoryview(b"")
        if give_back is not None:
            give_back()


class Rooms:
    """Divides memory among items. For any thread."""

    def __init__(self, memory: memoryview, landing_offset: int | None = None) -> None:
        """
        Args:
            memory: page-aligned, touched before it is needed: page faults of many threads at once
                would stall the event loop for tens of milliseconds.
            landing_offset: where it begins in the landing area, if it does.
        """
        self._memory = memory
        self._landing_offset = landing_offset
        self._table = SegmentTable(memory.nbytes)
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes that hold no item."""
        with self._lock:
            return self._table.free_bytes

    def take(self, size: int) -> Room | None:
        """Room for an item of ``size`` bytes, None if there is none now."""
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
    """Private memory whose pages are there. Takes about 0.1 s per GB, without the interpreter's
    lock.
    """
    memory = pages.private_memory(aligned(size, SEGMENT_ALIGNMENT))
    pages.populate(memory, for_writing=True)
    return memory
