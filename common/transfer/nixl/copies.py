"""Memory of a worker's own for what came over NIXL: touched before it is needed.

Page faults of many threads at once would stall the event loop for tens of milliseconds.
"""

import contextlib
from collections import deque

from common.transfer import pages


class Copies:
    """A pool of equal pieces. What doesn't fit, or comes when all are taken, gets memory of its
    own for the time: requests give theirs back only when all of their items have come.
    """

    def __init__(self, count: int, size: int) -> None:
        """
        Args:
            count: pieces.
            size: bytes of each.
        """
        self._count = count
        self._size = size
        self._free: deque[memoryview] = deque()
        for _ in range(count):
            memory = pages.private_memory(size)
            pages.populate(memory, for_writing=True)
            self._free.append(memory)

    @property
    def free(self) -> int:
        """Pieces of the pool that are not in use."""
        return len(self._free)

    def take(self, size: int) -> memoryview:
        """Page-aligned memory, to be given to :meth:`give_back`; from any thread.

        Args:
            size: bytes that are needed; there may be more.
        """
        if size <= self._size:
            with contextlib.suppress(IndexError):
                return self._free.popleft()
        memory = pages.private_memory(size)
        pages.populate(memory, for_writing=True)
        return memory

    def give_back(self, memory: memoryview) -> None:
        """Take memory back that nobody looks at any more; from any thread."""
        if memory.nbytes == self._size and len(self._free) < self._count:
            self._free.append(memory)
