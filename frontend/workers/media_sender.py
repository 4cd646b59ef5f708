"""Step 4 of a request: making processed media available to the chosen worker.

Owns the arena and the senders, and knows by which transport each worker is reached.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from common.errors import (
    ArenaUnavailableError,
    ConfigurationError,
    ProtocolError,
    WorkerBusyError,
)
from common.identity import WorkerId
from common.supervised import supervise
from common.telemetry import (
    ARENA_BYTES_USED,
    ARENA_LEASES,
    TENSOR_BYTES,
    TRANSFER_FALLBACKS,
    UNDECODABLE_MESSAGES,
)
from common.transfer.arena import Arena, ArenaStatistics
from common.transfer.arena_file import reap_orphans
from common.transfer.base import MediaHandle
from common.transfer.choice import SenderSet, TransferMode, TransportChoice, choose_transport
from common.transfer.handshake import TransferOffer, TransferReply, namespace, parse_reply
from common.transfer.nixl import NixlSender
from common.transfer.nixl_network import NixlNetwork, nixl_installed
from common.transfer.reference import refer
from common.transfer.registry import senders
from common.undo import undo_on_error
from frontend.processing import MediaItem

logger = logging.getLogger(__name__)

INLINE = TransportChoice("inline")


_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
"""Between offers of NIXL to workers that need it and don't have it yet."""

OfferTo = Callable[[bytes], Awaitable[None]]


@dataclass
class _Reached:
    """A connected worker.

    Attributes:
        offer_to: sends it another offer.
    """

    terms: TransferReply
    choice: TransportChoice
    offer_to: OfferTo | None


class MediaSender:
    """Lends media items to workers.

    NIXL is started with the first worker that needs it, unless nothing else is allowed.
    """

    def __init__(
        self,
        arena: Arena | None,
        mode: TransferMode,
        network: NixlNetwork | None = None,
    ) -> None:
        """
        Args:
            arena: shared memory to send from, or None to send everything inline.
            network: what NIXL may use; this host only by default.

        Raises:
            ConfigurationError: only NIXL is allowed, and can't be had.
        """
        self._arena = arena
        self._mode = mode
        self._network = network or NixlNetwork()
        self._senders = SenderSet(senders(arena, mode))
        self._workers: dict[WorkerId, _Reached] = {}
        self._nixl: NixlSender | None = None
        self._offering: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._closed = False
        if arena is not None:
            ARENA_LEASES.set_function(lambda: arena.statistics().leases)
            ARENA_BYTES_USED.set_function(lambda: arena.statistics().bytes_used)
            if mode is TransferMode.NIXL:
                self._use_nixl(_start_nixl(arena, self._network))

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
        self._workers[worker_id] = reached = _Reached(terms, choice, offer_to)
        self._say(worker_id, reached)
        if self._offering is None and (self._needs_nixl(reached) or self._nixl is not None):
            self._begin_offering()
        self._changed.set()
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

    def _say(self, worker_id: WorkerId, reached: _Reached) -> None:
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

    def _needs_nixl(self, reached: _Reached) -> bool:
        """Whether a worker should be offered NIXL as it is now."""
        if (
            self._arena is None
            or self._mode not in (TransferMode.AUTO, TransferMode.NIXL)
            or not nixl_installed()
            or reached.offer_to is None
            or reached.choice.transport != "inline"
        ):
            return False
        terms = reached.terms
        return terms.could_nixl and self._network.reaches(
            same_ipc=terms.same_ipc, same_loopback=terms.same_loopback
        )

    def _begin_offering(self) -> None:
        loop = asyncio.get_running_loop()
        if self._nixl is not None:
            self._nixl.on_change = lambda: _tell(loop, self._changed)
        self._offering = asyncio.create_task(
            supervise("NIXL offers", self._keep_offering), name="nixl-offers"
        )

    async def _keep_offering(self) -> None:
        """Offer NIXL to workers that need it, again and again until they have it."""
        pause = _FIRST_PAUSE_S
        while True:
            self._changed.clear()
            waiting = await self._offer_once()
            try:
                async with asyncio.timeout(pause if waiting else None):
                    await self._changed.wait()
                pause = _FIRST_PAUSE_S
            except TimeoutError:
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _offer_once(self) -> bool:
        """Offer what there is to all who need it; whether anybody needs it still."""
        for worker_id, reached in self._workers.items():
            former, reached.choice = reached.choice, self._choose(reached.terms)
            if former != reached.choice:
                self._say(worker_id, reached)
        needing = [each for each in self._workers.values() if self._needs_nixl(each)]
        if not needing or self._arena is None:
            return False
        if self._nixl is None:
            loop = asyncio.get_running_loop()
            starting = asyncio.ensure_future(
                asyncio.to_thread(_start_nixl, self._arena, self._network, lambda: self._closed)
            )
            try:
                sender = await asyncio.shield(starting)
            except ConfigurationError as error:
                logger.warning("workers that can't map the arena get media inline: %s", error)
                return True
            except asyncio.CancelledError:
                starting.add_done_callback(_close_late)
                raise
            sender.on_change = lambda: _tell(loop, self._changed)
            self._use_nixl(sender)
        if self._nixl is not None and self._nixl.offer is not None:
            offer = self.offer()
            for reached in needing:
                assert reached.offer_to is not None
                try:
                    await reached.offer_to(offer)
                except WorkerBusyError as error:
                    logger.info("NIXL is offered later: %s", error)
        return True

    def _use_nixl(self, sender: NixlSender) -> None:
        self._nixl = sender
        self._senders.add(sender)

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
        choice = INLINE if inline or reached is None else reached.choice
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
        if choice.transport == "reference":
            if media.source is not None:
                return refer(mm_hash, media.source)
            TRANSFER_FALLBACKS.labels("reference", "no_encoded_form").inc()
            choice = INLINE
        held = self._senders.send_held(choice, mm_hash)
        return held or await _in_thread(self._senders, choice, media)

    @property
    def arena(self) -> Arena | None:
        """Where processed media are kept and sent from, None if there is no such place."""
        return self._arena

    def statistics(self) -> ArenaStatistics | None:
        """State of the arena, None if there is none."""
        return None if self._arena is None else self._arena.statistics()

    def close(self) -> None:
        """Remove the arena. Workers that still read keep their mapping."""
        self._closed = True
        if self._offering is not None:
            self._offering.cancel()
        self._senders.close()
        if self._arena is not None:
            self._arena.close()


def _start_nixl(
    arena: Arena, network: NixlNetwork, given_up: Callable[[], bool] = lambda: False
) -> NixlSender:
    try:
        return NixlSender(arena, network, given_up=given_up)
    except ConfigurationError as error:
        raise ConfigurationError(f"NIXL can't be had: {error}") from error


def _close_late(starting: "asyncio.Future[NixlSender]") -> None:
    """Nobody waits for it any more; ending it takes as long as joining a thread."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        logger.debug("the event loop ended before the process that serves the arena")


def release(handles: Sequence[MediaHandle]) -> None:
    """Give handles back that no worker will ack."""
    for handle in handles:
        handle.release()


async def _in_thread(senders: SenderSet, choice: TransportChoice, media: MediaItem) -> MediaHandle:
    sending = asyncio.ensure_future(
        asyncio.to_thread(senders.send, choice, media.part.mm_hash, media.item)
    )
    try:
        return await asyncio.shield(sending)
    except asyncio.CancelledError:
        # The thread goes on; what it makes available must not stay so.
        sending.add_done_callback(_release_late)
        raise


def _release_late(sending: "asyncio.Future[MediaHandle]") -> None:
    if sending.exception() is None:
        sending.result().release()
