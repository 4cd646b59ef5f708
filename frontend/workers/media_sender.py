"""Step 4 of a request: making processed media available to the chosen worker.

Owns the arena and the senders, and knows by which transport each worker is reached.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial

from common.aio.cleanup import made_in_thread, undo_on_error
from common.errors import (
    ArenaUnavailableError,
    ConfigurationError,
    ProtocolError,
)
from common.identity import WorkerId
from common.observability.telemetry import (
    ARENA_BYTES,
    ARENA_BYTES_USED,
    ARENA_LEASES,
    TENSOR_BYTES,
    UNDECODABLE_MESSAGES,
)
from common.transfer.arena import Arena, ArenaAccess, ArenaStatistics, reap_orphans
from common.transfer.base import MediaHandle
from common.transfer.handshake import TransferOffer, TransferReply, namespace, parse_reply
from common.transfer.nixl_processes import NixlNetwork
from common.transfer.transports import (
    SenderSet,
    TransferMode,
    TransportChoice,
    better,
    choose_transport,
    indispensable,
    late_senders,
    senders,
)
from frontend.processing import MediaItem
from frontend.workers.late_transports import LateTransports, OfferTo, ReachedWorker

logger = logging.getLogger(__name__)


class MediaSender:
    """Sends media items to workers.

    Attributes:
        late: transports that are started with the first worker that needs them, unless nothing
            else is allowed.
    """

    def __init__(
        self,
        arena: ArenaAccess | None,
        mode: TransferMode,
        network: NixlNetwork | None = None,
    ) -> None:
        """
        Args:
            arena: shared memory to send from, or None to send everything inline.
            network: what transports over a network may use; this host only by default.

        Raises:
            ConfigurationError: the only transport that is allowed can't be had.
        """
        self._arena = arena
        self._mode = mode
        self._senders = SenderSet(senders(arena, mode))
        self._workers: dict[WorkerId, ReachedWorker] = {}
        self.late = LateTransports(
            late_senders(arena, mode, network or NixlNetwork()),
            self._workers.values(),
            review=self._review,
            offer=self.offer,
            add=self._senders.add,
            better=partial(better, mode),
        )
        if arena is not None:
            ARENA_LEASES.set_function(lambda: arena.statistics().leases)
        if isinstance(arena, Arena):  # whose else it is says so itself
            ARENA_BYTES.set(arena.statistics().bytes_total)
            ARENA_BYTES_USED.set_function(lambda: arena.statistics().bytes_used)
        for transport in indispensable(mode):
            self.late.start_now(transport)

    @classmethod
    def create(
        cls, arena_bytes: int, mode: TransferMode, network: NixlNetwork | None = None
    ) -> "MediaSender":
        """Make the arena. Takes as long as touching all its pages.

        Raises:
            ConfigurationError: shared memory or NIXL is asked for and can't be had.
        """
        reap_orphans()
        if mode is TransferMode.DISABLED:
            return cls(None, mode)
        if arena_bytes == 0:
            if mode is not TransferMode.AUTO:
                raise ConfigurationError(
                    f"DYNAMO_MM_TRANSFER={mode.value} needs --mm-arena-gb above 0"
                )
            return cls(None, mode)
        try:
            arena = Arena(arena_bytes)
        except ArenaUnavailableError as error:
            if mode is not TransferMode.AUTO:
                raise ConfigurationError(str(error)) from error
            logger.warning("media will travel inline: %s", error)
            return cls(None, mode)
        try:
            return cls(arena, mode, network)
        except ConfigurationError:
            arena.close()
            raise

    def offer(self) -> bytes:
        """What we tell a worker when a session opens, and when it changes."""
        offer = TransferOffer(ipc=namespace("ipc"), loopback=namespace("net"))
        return self._senders.add_offers(offer).model_dump_json().encode()

    def connect(
        self, worker_id: WorkerId, reply: bytes, offer_to: OfferTo | None = None
    ) -> TransportChoice:
        """Take a worker's answer to the offer; says how media will travel to it.

        Args:
            offer_to: sends it another offer; it is answered to :meth:`answered`.

        Raises:
            ProtocolError: the answer is malformed.
        """
        terms = parse_reply(reply)
        choice = self._choose(terms)
        self._workers[worker_id] = reached = ReachedWorker(terms, choice, offer_to)
        self._say(worker_id, reached)
        self.late.joined(reached)
        return choice

    def answered(self, worker_id: WorkerId, reply: bytes) -> None:
        """Take a worker's answer to a later offer."""
        reached = self._workers.get(worker_id)
        if reached is None:
            return
        try:
            reached.terms = parse_reply(reply)
        except ProtocolError as error:
            UNDECODABLE_MESSAGES.labels("frontend").inc()
            logger.warning("worker %s: %s", worker_id, error)
            return
        former, reached.choice = reached.choice, self._choose(reached.terms)
        if former != reached.choice:
            self._say(worker_id, reached)

    def _choose(self, terms: TransferReply) -> TransportChoice:
        return choose_transport(self._mode, self._senders.proven(terms))

    def _say(self, worker_id: WorkerId, reached: ReachedWorker) -> None:
        choice = reached.choice
        if choice.instead_of is None:
            return
        logger.warning(
            "worker %s: media travel by %s instead of %s: %s",
            worker_id,
            choice.transport,
            choice.instead_of,
            "; ".join(reached.terms.refusals) or choice.reason,
        )

    def _review(self) -> None:
        """Choose for every worker anew."""
        for worker_id, reached in self._workers.items():
            former, reached.choice = reached.choice, self._choose(reached.terms)
            if former != reached.choice:
                self._say(worker_id, reached)

    def transport(self, worker_id: WorkerId) -> str | None:
        """How media travel to a worker, None if it is not connected."""
        reached = self._workers.get(worker_id)
        return None if reached is None else reached.choice.transport

    def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone."""
        self._workers.pop(worker_id, None)

    async def send(
        self, worker_id: WorkerId, media: Iterable[MediaItem], *, inline: bool = False
    ) -> list[MediaHandle]:
        """Make items available to a worker. The caller releases every handle.

        Copies run in a thread. After an error or a cancellation nothing is sent.

        Args:
            inline: send the bytes themselves, since the worker could not get at them.

        Raises:
            UnsupportedItemError: an item that no transport can carry.
        """
        reached = self._workers.get(worker_id)
        choice = self._senders.certain if inline or reached is None else reached.choice
        handles: list[MediaHandle] = []
        with undo_on_error(partial(release, handles)):
            for each in media:
                handle = await self._send_one(choice, each)
                handles.append(handle)
                TENSOR_BYTES.labels(worker_id, handle.metadata.transport).inc(
                    handle.metadata.nbytes
                )
        return handles

    async def _send_one(self, choice: TransportChoice, media: MediaItem) -> MediaHandle:
        mm_hash = media.part.mm_hash
        held = self._senders.send_held(choice, mm_hash, media.source)
        if held is not None:
            return held
        send = partial(self._senders.send, choice, mm_hash, media.item)
        return await made_in_thread(send, MediaHandle.release)

    @property
    def arena(self) -> ArenaAccess | None:
        """Where processed media are kept and sent from, None if there is no such place."""
        return self._arena

    def statistics(self) -> ArenaStatistics | None:
        """State of the arena, None if there is none."""
        return None if self._arena is None else self._arena.statistics()

    def close(self) -> None:
        """Remove the arena. Workers that still read keep their mapping."""
        self.late.close()
        self._senders.close()
        if self._arena is not None:
            self._arena.close()


def release(handles: Sequence[MediaHandle]) -> None:
    """Give handles back that no worker will ack."""
    for handle in handles:
        handle.release()
