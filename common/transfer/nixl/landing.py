"""Memory that a worker shares with the process that reads over NIXL for it."""

import asyncio
import fcntl
import mmap
import os
from collections import deque
from dataclasses import dataclass

from common.errors import ArenaUnavailableError
from common.transfer import pages
from common.transfer.arena import SEGMENT_ALIGNMENT, aligned


@dataclass(frozen=True, eq=False)
class Slot:
    """Room for one read.

    Attributes:
        offset: of it, from the start of the area.
        memory: the same, as this process sees it. Others may write to it at any time.
    """

    offset: int
    memory: memoryview


class LandingArea:
    """Equal slots, given out one by one. For use on the event loop."""

    def __init__(self, count: int, slot_size: int) -> None:
        """
        Args:
            count: slots, at least 1.
            slot_size: bytes of each, rounded up to whole pages.

        Raises:
            ArenaUnavailableError: there is not that much memory.
        """
        self.slot_size = aligned(max(slot_size, 1), SEGMENT_ALIGNMENT)
        self.size = count * self.slot_size
        self._closed = False
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        try:
            self._descriptor = os.memfd_create(
                "mmrouter-nixl", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC
            )
            os.ftruncate(self._descriptor, self.size)
            # Or whoever took over the other process could end this one with SIGBUS.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            memory = memoryview(mmap.mmap(self._descriptor, self.size))
        except OSError as error:
            raise ArenaUnavailableError(
                f"can't have {self.size} bytes for NIXL to read to: {error}"
            ) from error
        pages.populate(memory, for_writing=True)
        self._free = deque(
            Slot(offset, memory[offset : offset + self.slot_size])
            for offset in range(0, self.size, self.slot_size)
        )

    def open(self) -> int:
        """A descriptor of the area for the other process."""
        return os.dup(self._descriptor)

    @property
    def free(self) -> int:
        """Slots that are not in use."""
        return len(self._free)

    async def take(self) -> Slot:
        """A slot; waits for one."""
        if self._free:
            return self._free.popleft()
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(waiter.result())
            raise

    def give_back(self, slot: Slot) -> None:
        """Take a slot back that nothing is read to any more."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        if not self._closed:
            self._free.append(slot)

    def close(self) -> None:
        """Close the file; the memory goes once no slot is in use."""
        self._closed = True
        self._free.clear()
        os.close(self._descriptor)
