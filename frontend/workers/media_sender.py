"""Step 4 of a request: make processed media available to the chosen worker.

Owns the arena and the senders, and knows each worker's transport. Late transports start once a
worker needs them, and are offered until it has them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from common.aio.cleanup import made_in_thread, undo_on_error
from common.aio.supervised import supervise
from common.backoff import Backoff
from common.errors import ArenaUnavailableError, ConfigurationError, ProtocolError, WorkerBusyError
from common.identity import WorkerId
from common.observability.telemetry import (
    ARENA_BYTES,
    ARENA_BYTES_USED,
    ARENA_LEASES,
    TENSOR_BYTES,
    UNDECODABLE_MESSAGES,
)
from common.transfer.arena import Arena, ArenaAccess, reap_orphans
from common.transfer.base import MediaHandle, MmKwargsSender
from common.transfer.handshake import TransferOffer, TransferReply, namespace, parse_reply
from common.transfer.metadata import Transport
from common.transfer.nixl import LateNixl
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

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 60.0
"""Backoff between offers to workers that still lack a transport they need."""

OfferTo = Callable[[bytes], Awaitable[None]]


@dataclass
class ReachedWorker:
    """A connected worker: its last answer, its transport, and how to send it another offer."""

    terms: TransferReply
    choice: TransportChoice
    offer_to: OfferTo | None


class MediaSender:
    """Sender of media items. ``started`` holds transports that take a second to start: with the
    first worker that needs one, unless no other transport is allowed.
    """

    def __init__(
        self, arena: ArenaAccess | None, mode: TransferMode, network: NixlNetwork | None = None
    ) -> None:
        """Send all inline without an arena. Networks default to this host only. Raises
        ConfigurationError if the only allowed transport is unavailable.
        """
        self.arena = arena
        self._mode = mode
        self._senders = SenderSet(senders(arena, mode))
        self._workers: dict[WorkerId, ReachedWorker] = {}
        self._late = late_senders(arena, mode, network or NixlNetwork())
        self.started: dict[Transport, MmKwargsSender] = {}
        self._changed = asyncio.Event()
        self._closed = False
        self._offering: asyncio.Task[None] | None = None
        if arena is not None:
            ARENA_LEASES.set_function(lambda: arena.statistics().leases)
        if isinstance(arena, Arena):  # the owner of a shared one exports it
            ARENA_BYTES.set(arena.statistics().bytes_total)
            ARENA_BYTES_USED.set_function(lambda: arena.statistics().bytes_used)
        for late in self._late:
            if late.transport in indispensable(mode):
                self._begin(late.start())

    @classmethod
    def create(
        cls, arena_bytes: int, mode: TransferMode, network: NixlNetwork | None = None
    ) -> "MediaSender":
        """Make the arena, touching all its pages. Raises ConfigurationError if shared memory or
        NIXL is required but unavailable.
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
            logger.warning("shared memory is unavailable (%s); media travel inline", error)
            return cls(None, mode)
        try:
            return cls(arena, mode, network)
        except ConfigurationError:
            arena.close()
            raise

    def offer(self) -> bytes:
        """Return the transfer offer for workers, sent at opening and after changes."""
        offer = TransferOffer(ipc=namespace("ipc"), loopback=namespace("net"))
        return self._senders.add_offers(offer).model_dump_json().encode()

    def connect(
        self, worker_id: WorkerId, reply: bytes, offer_to: OfferTo | None = None
    ) -> TransportChoice:
        """Take a worker's answer to the offer; return its transport. ``offer_to`` sends another
        offer, answered to :meth:`answered`. Raises ProtocolError if the reply is malformed.
        """
        terms = parse_reply(reply)
        choice = self._choose(terms)
        self._workers[worker_id] = reached = ReachedWorker(terms, choice, offer_to)
        self._say(worker_id, reached)
        if self._offering is None and (self.started or self._needs(reached)):
            loop = asyncio.get_running_loop()
            for sender in self.started.values():
                sender.on_change = partial(_tell, loop, self._changed)
            work = supervise("late transports", self._keep_offering)
            self._offering = asyncio.create_task(work, name="late-transports")
        self._changed.set()
        return choice

    def answered(self, worker_id: WorkerId, reply: bytes) -> None:
        reached = self._workers.get(worker_id)
        if reached is None:
            return
        try:
            reached.terms = parse_reply(reply)
        except ProtocolError as error:
            UNDECODABLE_MESSAGES.labels("frontend").inc()
            logger.warning("worker %s: %s", worker_id, error)
            return
        self._choose_again(worker_id, reached)

    def _choose_again(self, worker_id: WorkerId, reached: ReachedWorker) -> None:
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

    def transport(self, worker_id: WorkerId) -> str | None:
        reached = self._workers.get(worker_id)
        return None if reached is None else reached.choice.transport

    def forget(self, worker_id: WorkerId) -> None:
        self._workers.pop(worker_id, None)

    async def send(
        self, worker_id: WorkerId, media: Iterable[MediaItem], *, inline: bool = False
    ) -> list[MediaHandle]:
        """Make items available to a worker. The caller releases every handle.

        Copies run in a thread. After an error or a cancellation no handle is left. ``inline`` sends
        the bytes themselves, since the worker could not read them. Raises UnsupportedItemError for
        an item that no transport can carry.
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

    def close(self) -> None:
        """Remove the arena. Workers that still read keep their mapping."""
        self._closed = True
        if self._offering is not None:
            self._offering.cancel()
        self._senders.close()
        if self.arena is not None:
            self.arena.close()

    def _begin(self, sender: MmKwargsSender) -> None:
        self.started[sender.transport] = sender
        self._senders.add(sender)

    def _needs(self, worker: ReachedWorker) -> bool:
        return any(self._would_help(late, worker) for late in self._late)

    def _would_help(self, late: LateNixl, worker: ReachedWorker) -> bool:
        return (
            worker.offer_to is not None
            and late.transport in better(self._mode, worker.choice)
            and late.reaches(worker.terms)
        )

    async def _keep_offering(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while True:
            self._changed.clear()
            waiting = await self._offer_once()
            try:
                async with asyncio.timeout(backoff.next_s() if waiting else None):
                    await self._changed.wait()
            except TimeoutError:
                continue
            backoff.reset()

    async def _offer_once(self) -> bool:
        """Offer the started transports to workers that need them; return whether any still does."""
        for worker_id, reached in self._workers.items():
            self._choose_again(worker_id, reached)
        needing = [each for each in self._workers.values() if self._needs(each)]
        if not needing:
            return False
        for late in self._late:
            if late.transport not in self.started and any(
                self._would_help(late, worker) for worker in needing
            ):
                await self._start(late)
        if any(sender.offers for sender in self.started.values()):
            offer = self.offer()
            for worker in needing:
                assert worker.offer_to is not None
                try:
                    await worker.offer_to(offer)
                except WorkerBusyError as error:
                    logger.info("offering another transport later: %s", error)
        return True

    async def _start(self, late: LateNixl) -> None:
        loop = asyncio.get_running_loop()
        start = partial(late.start, lambda: self._closed)
        try:
            sender = await made_in_thread(start, MmKwargsSender.close)
        except ConfigurationError as error:
            logger.warning("could not start NIXL (%s); keeping the current transport", error)
            return
        sender.on_change = partial(_tell, loop, self._changed)
        self._begin(sender)


def release(handles: Sequence[MediaHandle]) -> None:
    for handle in handles:
        handle.release()


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        logger.debug("the event loop ended before the process that serves shared memory")
