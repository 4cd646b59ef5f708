"""The frontend's end: the arena is registered with NIXL, and workers READ from it. The frontend's
process has no agent, see :mod:`common.transfer.nixl.process`."""

import threading
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final

from common.aio.cleanup import undo_on_error
from common.errors import ArenaUnavailableError, ConfigurationError
from common.identity import MmHash
from common.transfer.arena import Arena, ArenaAccess, Lease
from common.transfer.base import MediaHandle
from common.transfer.checksum import checksum, new_key
from common.transfer.handshake import NixlOffer, TransferOffer, TransferReply
from common.transfer.metadata import NixlMetadata, Transport
from common.transfer.nixl.process import NixlProcess
from common.transfer.nixl_processes import (
    FromServer,
    Leased,
    NixlNetwork,
    Serving,
    ToServer,
    nixl_installed,
)
from common.transfer.shm import ArenaSender

_SERVER: Final = "common.transfer.nixl_processes.server"


class NixlSender(ArenaSender):
    """Leases segments of an arena to workers on any host."""

    transport: ClassVar[Transport] = "nixl"

    def __init__(
        self,
        arena: ArenaAccess,
        network: NixlNetwork,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the process that serves the arena and wait a second for it; not on the event loop.

        If devices register only writable memory, items are leased from a second arena of the same
        size, whose bytes are never trusted. Close this before the arena. ``given_up`` is polled:
        whether the wait was abandoned.

        Raises ConfigurationError: NIXL can't be used here.
        """
        writable = network.registers_for_writing
        self._own: Arena | None = None
        if writable:
            try:
                self._own = arena = Arena(arena.offer.size)
            except ArenaUnavailableError as error:
                raise ConfigurationError(f"no arena for NIXL alone: {error}") from error
        super().__init__(arena)
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
        """Offer for workers; a new one after each restart, None in between."""
        return self._offer

    @property
    def pid(self) -> int | None:
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

    def send_held(self, mm_hash: MmHash) -> MediaHandle | None:
        lease = self.arena.lease_now(mm_hash)
        if lease is None:
            return None
        if lease.checksum and self._offer is not None:
            return self._handle(lease)
        lease.release()  # completing it takes long, or fails
        return None

    def _describe(self, lease: Lease) -> NixlMetadata:
        offer = self._offer
        if offer is None:
            raise ArenaUnavailableError("the process that serves the arena is being replaced")
        if not lease.checksum:
            lease.keep_checksum(checksum(self._key, lease.generation, lease.mm_hash, lease.memory))
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
            return  # the next process gets it when it is ready

    def close(self) -> None:
        """Stop serving. Later calls do nothing."""
        self._process.close()
        if self._own is not None:
            self._own.close()


class LateNixl:
    """Factory of a :class:`NixlSender` on demand: its process takes a second to start."""

    transport: ClassVar[Transport] = "nixl"

    def __init__(self, arena: ArenaAccess, network: NixlNetwork) -> None:
        self._arena = arena
        self._network = network

    def reaches(self, terms: TransferReply) -> bool:
        """Return whether NIXL may reach a worker, given its location."""
        return (
            nixl_installed()
            and terms.could_nixl
            and self._network.reaches(same_ipc=terms.same_ipc, same_loopback=terms.same_loopback)
        )

    def start(self, given_up: Callable[[], bool] = lambda: False) -> NixlSender:
        """Start the sender and wait, in a thread. Raises ConfigurationError."""
        try:
            return NixlSender(self._arena, self._network, given_up=given_up)
        except ConfigurationError as error:
            raise ConfigurationError(f"NIXL can't be had: {error}") from error
