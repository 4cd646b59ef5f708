"""Memory that a worker's NIXL reads arrive in: a registered pool, and more when it must be."""

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from common.transfer import pages
from common.transfer.nixl_agent import NixlAgent
from common.transfer.segment import HEADER_SIZE, aligned
from common.transfer.segment_table import SEGMENT_ALIGNMENT

_SPARE: Final = HEADER_SIZE


@dataclass(frozen=True, eq=False)
class ReadBuffer:
    """Registered memory for one segment.

    Attributes:
        segment: where the segment goes; 64-byte aligned.
        spare: room for another look at its header.
        segment_address: of ``segment``.
        spare_address: of ``spare``.
        registration: NIXL's, if the buffer is registered by itself; None in the pool.
    """

    segment: memoryview
    spare: memoryview
    segment_address: int
    spare_address: int
    registration: Any = None


def _buffer(memory: memoryview, registration: Any = None) -> ReadBuffer:
    address = pages.address_of(memory)
    return ReadBuffer(
        segment=memory[_SPARE:],
        spare=memory[:_SPARE],
        segment_address=address + _SPARE,
        spare_address=address,
        registration=registration,
    )


class ReadBuffers:
    """A pool of equal slots, registered once. What doesn't fit, or comes when all slots are
    taken, gets memory of its own for the time: waiting for a slot could last for ever, as a
    request gives its slots back only when all of its items have come.
    """

    def __init__(self, agent: NixlAgent, count: int, slot_size: int) -> None:
        """
        Args:
            count: slots; 0 is possible.
            slot_size: bytes of the largest segment that fits.

        Raises:
            ArenaUnavailableError: the memory can't be registered.
        """
        self._agent = agent
        self._slot_size = slot_size
        self._free: deque[ReadBuffer] = deque()
        self.temporary = 0
        size = aligned(_SPARE + slot_size, SEGMENT_ALIGNMENT)
        if count:
            memory = pages.private_memory(count * size)
            pages.populate(memory, for_writing=True)
            # Registered as long as the agent lives.
            agent.register(pages.address_of(memory), memory.nbytes)
            for start in range(0, count * size, size):
                self._free.append(_buffer(memory[start : start + size]))

    @property
    def free(self) -> int:
        """Slots that are not in use."""
        return len(self._free)

    def take(self, length: int) -> ReadBuffer:
        """Memory for a segment. Call from the agent's thread.

        Raises:
            ArenaUnavailableError: memory of its own can't be registered.
        """
        if length <= self._slot_size and self._free:
            return self._free.popleft()
        memory = pages.private_memory(_SPARE + length)
        registration = self._agent.register(pages.address_of(memory), memory.nbytes)
        self.temporary += 1
        return _buffer(memory, registration)

    def give_back(self, buffer: ReadBuffer) -> None:
        """Take memory back that nothing reads, or writes to, any more.

        Call from the agent's thread, or for a slot of the pool from any.
        """
        if buffer.registration is None:
            self._free.append(buffer)
        else:
            self._agent.deregister(buffer.registration)
            self.temporary -= 1
