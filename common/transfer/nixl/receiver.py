"""The worker's end: it READs from the arena of a frontend anywhere.

The worker has no agent in its own process, see :mod:`common.transfer.nixl.process`.
"""

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from common.errors import ArenaUnavailableError, CorruptSegmentError
from common.transfer.arena import SEGMENTS_START
from common.transfer.base import Accepted, Attachment, Attachments, MmKwargsReceiver, Received
from common.transfer.handshake import NixlOffer, TransferOffer, TransferReply
from common.transfer.metadata import NixlMetadata, Transport
from common.transfer.nixl.peers import NixlPeers
from common.transfer.nixl.reading import NixlReading
from common.transfer.nixl_processes import NixlNetwork


class NixlReceiver(MmKwargsReceiver[NixlMetadata]):
    """Reads segments by way of a process of its own.

    Attributes:
        network: what it may use.
    """

    transport: ClassVar[Transport] = "nixl"
    metadata_type = NixlMetadata

    def __init__(
        self,
        network: NixlNetwork,
        *,
        memory: int = 256 << 20,
        slots: int = 32,
        deadline: float = 10.0,
    ) -> None:
        """Starts nothing: the process comes with the first frontend that needs it.

        Args:
            memory: bytes in which items lie until they are given back, a multiple of the page
                size; what finds no room there gets memory of its own for the time.
            slots: reads that go on at the same time, each of an item that is used where it lands
                or of a piece of 2 MiB.
            deadline: seconds that a read may take.

        Raises:
            ConfigurationError: the network is impossible.
        """
        super().__init__()
        network.transports()
        self.network = network
        self._reading = NixlReading(network, slots, memory)
        self._peers = NixlPeers(self._reading, deadline)
        self._attachments = Attachments(self._peers.detach)

    async def start(self) -> None:
        """Start the process now: about a second.

        Raises ConfigurationError: NIXL can't be used here.
        """
        await self._reading.start()

    @property
    def free_slots(self) -> int:
        return self._reading.free_slots

    def add_prospects(self, reply: TransferReply) -> TransferReply:
        reaches = self.network.reaches(same_ipc=reply.same_ipc, same_loopback=reply.same_loopback)
        return reply.model_copy(update={"could_nixl": reaches})

    def obstacle(self, reply: TransferReply) -> str:
        if reply.could_nixl:
            return ""
        return "this worker's NIXL doesn't lead there without --nixl-interface"

    async def accept(self, offer: TransferOffer, reply: TransferReply) -> Accepted | None:
        if offer.nixl is None:
            return None
        attachment = await self.attach(offer.nixl)
        return Accepted(reply.model_copy(update={"nixl": offer.nixl.agent}), attachment)

    async def attach(self, offer: NixlOffer) -> Attachment:
        """Connect to a frontend and prove it by reading the arena's probe. A connection that
        breaks later is made anew, until all who attached it have detached.

        Raises:
            ArenaUnavailableError: it can't be reached, or the probe is wrong.
            ConfigurationError: NIXL can't be used here.
            TransferTimeoutError: it doesn't answer within the deadline.
        """
        await self._reading.start()
        await self._peers.attach(offer)
        return self._attachments.add(offer.agent)

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
                metadata.agent, self._reading.read(offer, metadata), Received.release
            )
        except ArenaUnavailableError:
            self._peers.broke(offer)
            raise

    async def close(self) -> None:
        self._peers.close()
        await asyncio.shield(self._reading.close())
        # Or they would hold their slots until the event loop has its next turn.
        await self._peers.ended()
