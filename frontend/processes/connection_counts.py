"""How many connections each process of a frontend has, in memory that all of them see.

All accept from one socket, and of several that have nothing to do the kernel wakes the same one
first each time: it would get all connections of a client that opens them one after the other and
keeps them.
"""

import mmap
import os
from typing import Final

_NOT_ACCEPTING: Final = -1


class ConnectionCounts:
    """A number for each process. Every process writes its own only."""

    def __init__(self, descriptor: int, processes: int) -> None:
        """
        Args:
            descriptor: of the memory, from :meth:`make`.
        """
        self._counts = memoryview(mmap.mmap(descriptor, 8 * processes)).cast("q")

    @staticmethod
    def make(processes: int) -> int:
        """Memory for some processes, of which none accepts yet; its descriptor."""
        descriptor = os.memfd_create("mmrouter-connections", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 8 * processes)
        counts = ConnectionCounts(descriptor, processes)
        for process in range(processes):
            counts.not_accepting(process)
        return descriptor

    def set(self, process: int, connections: int) -> None:
        """How many a process has that accepts more."""
        self._counts[process] = connections

    def not_accepting(self, process: int) -> None:
        """A process accepts no connections, or is gone."""
        self._counts[process] = _NOT_ACCEPTING

    def another_has_fewer(self, process: int) -> bool:
        """Whether another process that accepts connections has fewer."""
        own = self._counts[process]
        return any(_NOT_ACCEPTING < count < own for count in self._counts)
