"""Transports that are started once a worker needs them, and offered until it has them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from common.aio.cleanup import made_in_thread
from common.aio.supervised import supervise
from common.backoff import Backoff
from common.errors import ConfigurationError, WorkerBusyError
from common.transfer.base import LateSender, MmKwargsSender
from common.transfer.handshake import TransferReply
from common.transfer.metadata import Transport
from common.transfer.transports import TransportChoice

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
"""Between offers to workers that need a transport and don't have it yet."""

OfferTo = Callable[[bytes], Awaitable[None]]


@dataclass
class ReachedWorker:
    """A connected worker.

    Attributes:
        terms: its answer to the last offer.
        choice: how media travel to it.
        offer_to: sends it another offer; None if it takes none.
    """

    terms: TransferReply
    choice: TransportChoice
    offer_to: OfferTo | None


class LateTransports:
    """Begins with the first worker that needs one of them.

    Attributes:
        started: those that run.
    """

    def __init__(
        self,
        late: Sequence[LateSender],
        workers: Collection[ReachedWorker],
        *,
        review: Callable[[], None],
        offer: Callable[[], bytes],
        add: Callable[[MmKwargsSender], None],
        better: Callable[[TransportChoice], Collection[Transport]],
    ) -> None:
        """
        Args:
            late: what may be started.
            workers: those that are connected at any time.
            review: chooses for each of them anew.
            offer: what they are told.
            add: has one more transport from now on.
            better: the transports that would be preferred to a choice.
        """
        self.started: dict[Transport, MmKwargsSender] = {}
        self._late = late
        self._workers = workers
        self._review = review
        self._offer = offer
        self._add = add
        self._better = better
        self._changed = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start_now(self, transport: Transport) -> None:
        """Start one that no worker can do without. Takes a second, or longer.

        Raises:
            ConfigurationError: it can't be had.
        """
        for late in self._late:
            if late.transport == transport:
                self._begin(late.start())

    def joined(self, worker: ReachedWorker) -> None:
        """A worker connected, or answered."""
        if self._task is None and (self.started or self._needs(worker)):
            loop = asyncio.get_running_loop()
            for sender in self.started.values():
                sender.on_change = partial(_tell, loop, self._changed)
            work = supervise("late transports", self._keep_offering)
            self._task = asyncio.create_task(work, name="late-transports")
        self._changed.set()

    def close(self) -> None:
        """Offer nothing more. What runs has its own owner, and what is being started ends."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    def _begin(self, sender: MmKwargsSender) -> None:
        self.started[sender.transport] = sender
        self._add(sender)

    def _needs(self, worker: ReachedWorker) -> bool:
        """Whether a worker should be offered one of them as it is now."""
        return any(self._would_help(late, worker) for late in self._late)

    def _would_help(self, late: LateSender, worker: ReachedWorker) -> bool:
        return (
            worker.offer_to is not None
            and late.transport in self._better(worker.choice)
            and late.reaches(worker.terms)
        )

    async def _keep_offering(self) -> None:
        """Offer to workers in need, again and again until they need nothing."""
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
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
        """Offer what there is to all who need it; whether anybody needs it still."""
        self._review()
        needing = [each for each in self._workers if self._needs(each)]
        if not needing:
            return False
        for late in self._late:
            if late.transport not in self.started and any(
                self._would_help(late, worker) for worker in needing
            ):
                await self._start(late)
        if any(sender.offers for sender in self.started.values()):
            offer = self._offer()
            for worker in needing:
                assert worker.offer_to is not None
                try:
                    await worker.offer_to(offer)
                except WorkerBusyError as error:
                    logger.info("another transport is offered later: %s", error)
        return True

    async def _start(self, late: LateSender) -> None:
        loop = asyncio.get_running_loop()
        start = partial(late.start, lambda: self._closed)
        try:
            sender = await made_in_thread(start, MmKwargsSender.close)
        except ConfigurationError as error:
            logger.warning("media go on to travel as they do: %s", error)
            return
        sender.on_change = partial(_tell, loop, self._changed)
        self._begin(sender)


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        logger.debug("the event loop ended before the process that serves the arena")
