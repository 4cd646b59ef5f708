"""Other hosts: the arena is registered with NIXL once, and workers READ from it."""

import asyncio
import threading
from collections.abc import Sequence
from typing import ClassVar, Final

from common.errors import ArenaUnavailableError, CorruptSegmentError
from common.transfer import pages
from common.transfer.arena import Arena, Lease
from common.transfer.arena_layout import SEGMENTS_START
from common.transfer.arena_sender import ArenaSender
from common.transfer.base import Loan, MmKwargsReceiver, Received, SentHook
from common.transfer.metadata import NixlMetadata, Transport
from common.transfer.nixl_agent import NixlAgent, NixlOffer
from common.transfer.nixl_peers import NixlPeers
from common.transfer.nixl_reader import NixlReader

_IDLE_PAUSE: Final = 0.02
_LENDING_PAUSE: Final = 0.001


class NixlSender(ArenaSender):
    """Lends segments of an arena to workers anywhere.

    Attributes:
        offer: goes to workers, once.
    """

    transport: ClassVar[Transport] = "nixl"

    def __init__(self, arena: Arena, *, on_sent: SentHook | None = None) -> None:
        """Make the agent and register the arena: about half a second, once.

        Close this before the arena.

        Raises:
            ConfigurationError: NIXL can't be used here.
            ArenaUnavailableError: the arena can't be registered.
        """
        super().__init__(arena, on_sent=on_sent)
        # Keeps the memory mapped for as long as it is registered.
        self._memory = arena.memory
        self._agent = NixlAgent("frontend")
        address = pages.address_of(self._memory)
        self._registration = self._agent.register(address, self._memory.nbytes)
        self.offer = NixlOffer(
            agent=self._agent.name,
            metadata=NixlOffer.pack_metadata(self._agent.metadata()),
            address=address,
            arena=arena.offer,
        )
        self._loans = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="nixl-frontend", daemon=True)
        self._thread.start()

    def _describe(self, lease: Lease) -> NixlMetadata:
        return NixlMetadata(
            mm_hash=lease.mm_hash,
            envelope_size=lease.layout.envelope_size,
            buffer_sizes=lease.layout.buffer_sizes,
            agent=self.offer.agent,
            offset=lease.offset,
            generation=lease.generation,
        )

    def _loan(self, lease: Lease) -> Loan:
        with self._changed:
            self._loans += 1
            if self._loans == 1:
                self._changed.notify()

        def end() -> None:
            lease.release()
            with self._changed:
                self._loans -= 1

        return Loan(self._describe(lease), on_release=end)

    def _serve(self) -> None:
        """Move what others read from us.

        Over RDMA or within a host a READ needs that for connecting only. Over TCP this
        process sends the bytes itself, so it looks often while somebody is about to read;
        not more often than a reader notices, since each look takes the interpreter's lock.
        """
        while True:
            with self._changed:
                if not self._closed:
                    self._changed.wait(_LENDING_PAUSE if self._loans else _IDLE_PAUSE)
                if self._closed:
                    return
            self._agent.progress()

    def close(self) -> None:
        """Stop serving and deregister the arena. The second and later calls do nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._agent.deregister(self._registration)
        del self._agent
        self._memory = memoryview(b"")


class NixlReceiver(MmKwargsReceiver[NixlMetadata]):
    """Reads segments into registered memory of its own."""

    transport: ClassVar[Transport] = "nixl"
    metadata_type = NixlMetadata

    def __init__(
        self, *, slots: int = 8, slot_size: int = 32 << 20, deadline: float = 10.0
    ) -> None:
        """Make the agent and its pool of memory: about half a second.

        Args:
            slots: how many items the pool holds.
            slot_size: bytes of the largest; larger ones, or more of them, get memory that is
                registered for the time.
            deadline: seconds that a read may take.

        Raises:
            ConfigurationError: NIXL can't be used here.
            ArenaUnavailableError: the pool can't be registered.
        """
        super().__init__()
        self._reader = NixlReader(slots, slot_size)
        self._peers = NixlPeers(self._reader, deadline)

    @property
    def free_slots(self) -> int:
        """Slots of the pool that hold no item."""
        return self._reader.buffers.free

    async def attach(self, offer: NixlOffer) -> None:
        """Connect to a frontend and prove it by reading the arena's probe. A connection that
        breaks later is made anew, until :meth:`detach`.

        Raises:
            ArenaUnavailableError: it can't be reached, or the probe is wrong.
            TransferTimeoutError: it doesn't answer within the deadline.
        """
        await self._peers.attach(offer)

    def detach(self, agent: str) -> None:
        """Let go of a frontend that left, or can't be reached for a while; items received from
        it stay usable.
        """
        self._peers.detach(agent)

    async def _receive(self, metadata: NixlMetadata, frames: Sequence[memoryview]) -> Received:
        offer = self._peers.offer(metadata.agent)
        length = metadata.layout.length
        if metadata.offset < SEGMENTS_START or metadata.offset + length > offer.arena.size:
            raise CorruptSegmentError(
                f"no segment of {length} bytes can be at {metadata.offset} in an arena of "
                f"{offer.arena.size} bytes"
            )
        try:
            return await self._peers.within_deadline(
                metadata.agent, self._reader.read(offer, metadata), Received.release
            )
        except ArenaUnavailableError:
            self._peers.broke(offer)
            raise

    async def close(self) -> None:
        self._peers.close()
        await asyncio.to_thread(self._reader.thread.close)
