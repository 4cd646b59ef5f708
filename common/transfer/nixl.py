"""Other hosts: the arena is registered with NIXL, and workers READ from it.

Neither side has an agent in its own process, see :mod:`common.transfer.nixl_process`.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Final

from common.errors import ArenaUnavailableError, ConfigurationError, CorruptSegmentError
from common.identity import MmHash
from common.transfer.arena import Arena, Lease
from common.transfer.arena_layout import SEGMENTS_START
from common.transfer.arena_sender import ArenaSender
from common.transfer.attachment import Attachment, Attachments
from common.transfer.base import Accepted, MediaHandle, MmKwargsReceiver, Received, SentHook
from common.transfer.checksum import checksum, new_key
from common.transfer.handshake import TransferOffer, TransferReply
from common.transfer.metadata import NixlMetadata, Transport
from common.transfer.nixl_messages import FromServer, Leased, Serving, ToServer
from common.transfer.nixl_network import NixlNetwork
from common.transfer.nixl_offer import NixlOffer
from common.transfer.nixl_peers import NixlPeers
from common.transfer.nixl_process import NixlProcess
from common.transfer.nixl_reading import NixlReading
from common.transfer.segment import HEADER_SIZE
from common.undo import undo_on_error

_SERVER: Final = "common.transfer.nixl_server"


class NixlSender(ArenaSender):
    """Leases segments of an arena to workers anywhere."""

    transport: ClassVar[Transport] = "nixl"

    def __init__(
        self,
        arena: Arena,
        network: NixlNetwork,
        *,
        on_sent: SentHook | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the process that serves the arena, and wait for it: a second, not on the
        event loop.

        Where devices register no memory but what can be written, items are leased from a second
        arena of the same size: what somebody writes there is nobody's truth.

        Close this before the arena.

        Args:
            given_up: whether nobody waits for it any more; asked now and then.

        Raises:
            ConfigurationError: NIXL can't be used here.
        """
        writable = network.registers_for_writing
        self._own: Arena | None = None
        if writable:
            try:
                self._own = arena = Arena(arena.offer.size)
            except ArenaUnavailableError as error:
                raise ConfigurationError(f"no arena for NIXL alone: {error}") from error
        super().__init__(arena, on_sent=on_sent)
        self._key = new_key()
        self._offer: NixlOffer | None = None
        self._handles = 0
        self._counting = threading.Lock()
        self._process: NixlProcess[ToServer, FromServer] = NixlProcess(
            _SERVER,
            network,
            partial(arena.open, writable=writable),
            arena.offer.size,
            writable,
            FromServer,
            on_message=self._serving,
            on_lost=self._lost,
        )
        try:
            self._process.wait_until_ready(given_up)
        except ConfigurationError:
            self.close()
            raise

    @property
    def offer(self) -> NixlOffer | None:
        """Goes to workers; another one after each restart, None in between."""
        return self._offer

    @property
    def pid(self) -> int | None:
        """Of the process that serves the arena."""
        return self._process.pid

    @property
    def offers(self) -> bool:
        return self._offer is not None

    def add_offer(self, offer: TransferOffer) -> TransferOffer:
        return offer.model_copy(update={"nixl": self._offer})

    def proven(self, reply: TransferReply) -> bool:
        offer = self._offer
        return offer is not None and reply.nixl == offer.agent

    def _serving(self, message: FromServer) -> None:
        if isinstance(message, Serving):
            self._offer = NixlOffer(
                agent=message.agent,
                metadata=NixlOffer.pack_metadata(message.metadata),
                address=message.address,
                arena=self.arena.offer,
                checksum_key=self._key.hex(),
            )
            with self._counting:
                self._say(bool(self._handles))
            self.on_change()

    def _lost(self) -> None:
        self._offer = None
        self.on_change()

    def _send_held(self, mm_hash: MmHash) -> MediaHandle | None:
        lease = self.arena.lease(mm_hash)
        if lease is None:
            return None
        if lease.checksum and self._offer is not None:
            return self._handle(lease)
        lease.release()  # what is missing takes long, or an error
        return None

    def _describe(self, lease: Lease) -> NixlMetadata:
        offer = self._offer
        if offer is None:
            raise ArenaUnavailableError("the process that serves the arena is being replaced")
        if not lease.checksum:
            lease.keep_checksum(
                checksum(self._key, lease.generation, lease.mm_hash, lease.memory[HEADER_SIZE:])
            )
        return NixlMetadata(
            mm_hash=lease.mm_hash,
            envelope_size=lease.layout.envelope_size,
            buffer_sizes=lease.layout.buffer_sizes,
            agent=offer.agent,
            offset=lease.offset,
            generation=lease.generation,
            checksum=lease.checksum.hex(),
        )

    def _handle(self, lease: Lease) -> MediaHandle:
        with undo_on_error(lease.release):
            metadata = self._describe(lease)
        self._leased(1)

        def end() -> None:
            lease.release()
            self._leased(-1)

        return MediaHandle(metadata, on_release=end)

    def _leased(self, change: int) -> None:
        with self._counting:
            before, self._handles = self._handles, self._handles + change
            if bool(before) != bool(self._handles):
                self._say(bool(self._handles))

    def _say(self, leased: bool) -> None:
        try:
            self._process.send(Leased(leased))
        except ArenaUnavailableError:
            return  # the next one is told when it is ready

    def close(self) -> None:
        """Stop serving. The second and later calls do nothing."""
        self._process.close()
        if self._own is not None:
            self._own.close()


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
        slots: int = 8,
        slot_size: int = 32 << 20,
        deadline: float = 10.0,
    ) -> None:
        """Starts nothing: the process comes with the first frontend that needs it.

        Args:
            slots: how many reads go on at the same time.
            slot_size: bytes that each takes at once; larger segments come in pieces.
            deadline: seconds that a read may take.

        Raises:
            ConfigurationError: the network is impossible.
        """
        super().__init__()
        network.transports()
        self.network = network
        self._reading = NixlReading(network, slots, slot_size)
        self._peers = NixlPeers(self._reading, deadline)
        self._attachments = Attachments(self._peers.detach)

    async def start(self) -> None:
        """Start the process now: about a second.

        Raises:
            ConfigurationError: NIXL can't be used here.
        """
        await self._reading.start()

    @property
    def free_slots(self) -> int:
        """Slots that nothing is read to."""
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
                metadata.agent, self._reading.read(offer, metadata)
            )
        except ArenaUnavailableError:
            self._peers.broke(offer)
            raise

    async def close(self) -> None:
        self._peers.close()
        await asyncio.shield(self._reading.close())
