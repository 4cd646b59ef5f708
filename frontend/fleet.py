"""Which workers there are, and a link to each.

Follows discovery, refuses cards that do not fit, opens links, opens them again when
they are lost, and tells the router who can take requests.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from common.card import WorkerCard, WorkerState, check_compatible
from common.discovery.base import CardGone, CardPresent, CardWatcher
from common.errors import (
    CardIncompatibleError,
    CardKeyError,
    ConfigurationError,
    NoWorkerError,
    ProtocolError,
    WorkerLostError,
)
from common.fleet_key import FleetKey
from common.fleet_sockets import check_card, frontend_context
from common.identity import Incarnation, WorkerId
from common.protocol import Status
from common.telemetry import HF_PROCESSOR_RUNS, REFUSED_CARDS, WORKERS
from frontend.media import MediaLender
from frontend.router.events import EventSource
from frontend.router.router import RoutableWorker, Router
from frontend.worker_link import WorkerLink

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5
RECONNECT_MAX_S = 8.0


@dataclass
class Member:
    """A worker with a card that fits.

    Attributes:
        link: None while it is not connected.
        keeper: opens the link, again and again, until the card is gone.
        leaving: why the link is closed, for the requests on it.
        joined: when the link was opened: monotonic seconds.
    """

    card: WorkerCard
    link: WorkerLink | None
    status: Status | None
    keeper: asyncio.Task[None] | None
    leaving: str = "this frontend is shutting down"
    joined: float = float("-inf")


class Fleet:
    """The workers of this frontend."""

    def __init__(
        self,
        watcher: CardWatcher,
        router: Router,
        lender: MediaLender,
        frontend_id: Incarnation,
        vllm_version: str,
        key: FleetKey | None = None,
    ) -> None:
        """
        Args:
            key: without one, workers must be on this host and have none either.
        """
        self._watcher = watcher
        self._router = router
        self._lender = lender
        self._frontend_id = frontend_id
        self._vllm_version = vllm_version
        self._members: dict[WorkerId, Member] = {}
        self._refused: dict[WorkerId, str] = {}
        self._key = key
        self._closed = False
        self._arrival = asyncio.Event()
        self._context = frontend_context(key)
        self._contract: asyncio.Future[WorkerCard] = asyncio.get_running_loop().create_future()

    async def contract(self) -> WorkerCard:
        """The first card that fits; all others must agree with it."""
        return await asyncio.shield(self._contract)

    @property
    def connected(self) -> bool:
        """Whether some worker can take a request now."""
        return any(True for _ in self._available())

    def link(self, worker_id: WorkerId) -> WorkerLink:
        """The link to a worker.

        Raises:
            WorkerLostError: it is not connected any more.
        """
        member = self._members.get(worker_id)
        if member is None or member.link is None:
            raise WorkerLostError(f"worker {worker_id} is not connected")
        return member.link

    def check_available(self) -> None:
        """Raises NoWorkerError, with what is known of the reason, if nobody is there."""
        if self.connected:
            return
        if self._closed:
            raise NoWorkerError("this frontend is shutting down")
        if self._refused:
            raise NoWorkerError("no worker is available: " + "; ".join(self._refused.values()))
        raise NoWorkerError("no worker is available: none has registered yet, or all are gone")

    def joined_since(self, worker_id: WorkerId, moment: float) -> bool:
        """Whether a worker came, or came back, after a moment: monotonic seconds."""
        member = self._members.get(worker_id)
        return member is not None and member.joined > moment

    @property
    def arrival(self) -> asyncio.Event:
        """Set once the next worker has joined, or none will any more."""
        return self._arrival

    @property
    def closed(self) -> bool:
        """Whether this frontend is shutting down."""
        return self._closed

    def members(self) -> list[Member]:
        """Every worker with a card that fits, connected or not."""
        return list(self._members.values())

    def refused(self) -> dict[WorkerId, str]:
        """Workers that were refused, with the reason."""
        return dict(self._refused)

    async def run(self) -> None:
        """Follow discovery until cancelled."""
        async for change in self._watcher.changes():
            match change:
                case CardPresent(card):
                    await self._card_present(card)
                case CardGone(worker_id):
                    self._refused.pop(worker_id, None)
                    await self._remove(worker_id, "its card is gone")
                    self._router.forget_worker(worker_id)
            self._count()

    async def close(self) -> None:
        """Leave every worker. Requests that still run fail."""
        self._closed = True
        self._arrival.set()
        for worker_id in list(self._members):
            await self._remove(worker_id, "this frontend is shutting down")
        self._context.destroy(linger=200)  # ms: lets the goodbyes leave

    async def _card_present(self, card: WorkerCard) -> None:
        if self._closed:
            return
        known = self._members.get(card.worker_id)
        if known is not None and known.card.incarnation != card.incarnation:
            await self._remove(card.worker_id, "it restarted")
            known = None
        if known is not None:
            known.card = card
            if card.state is WorkerState.DRAINING:
                await self._router.remove_worker(card.worker_id)
            return
        if card.state is WorkerState.DRAINING:
            return
        try:
            self._check(card)
        except (CardIncompatibleError, CardKeyError) as error:
            self._refused[card.worker_id] = str(error)
            REFUSED_CARDS.labels(error.field).inc()
            logger.error("%s", error)
            return
        self._refused.pop(card.worker_id, None)
        if not self._contract.done():
            self._contract.set_result(card)
        member = Member(card, link=None, status=None, keeper=None)
        self._members[card.worker_id] = member
        member.keeper = asyncio.create_task(self._keep(member), name=f"keep-{card.worker_id}")

    def _check(self, card: WorkerCard) -> None:
        check_card(card, self._key)
        if card.vllm_version != self._vllm_version:
            raise CardIncompatibleError(
                card.worker_id, "vllm_version", self._vllm_version, card.vllm_version
            )
        if self._contract.done():
            check_compatible(self._contract.result(), card)

    async def _remove(self, worker_id: WorkerId, reason: str) -> None:
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        logger.info("worker %s removed: %s", worker_id, reason)
        member.leaving = reason
        if member.keeper is not None:
            member.keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await member.keeper

    async def _keep(self, member: Member) -> None:
        """Keep a link to a worker open until cancelled."""
        pause = RECONNECT_S
        while True:
            link = WorkerLink(
                member.card,
                self._context,
                self._frontend_id,
                lambda status: self._reported(member, status),
                self._router.settings.stall_s,
            )
            try:
                await link.open(self._lender.offer())
                pause = RECONNECT_S
                await self._joined(member, link)
                lost = await link.lost()
                logger.warning("%s", lost)
                if lost.blames_worker:
                    self._router.link_lost(
                        member.card.worker_id, member.card.incarnation, type(lost).__name__
                    )
            except (WorkerLostError, ProtocolError, ConfigurationError) as error:
                logger.warning("%s", error)
            finally:
                member.link = None
                await link.close(member.leaving)
                self._lender.forget(member.card.worker_id)
                await self._router.remove_worker(member.card.worker_id)
                self._count()
            await asyncio.sleep(pause)
            pause = min(pause * 2, RECONNECT_MAX_S)

    async def _joined(self, member: Member, link: WorkerLink) -> None:
        card = member.card
        choice = self._lender.connect(card.worker_id, link.reply)
        if card.state is WorkerState.READY:
            await self._router.add_worker(_routable(card))
        member.link = link
        member.joined = time.monotonic()
        self._arrival.set()
        self._arrival = asyncio.Event()
        self._count()
        logger.info("worker %s joined, media travel by %s", card.worker_id, choice.transport)

    def _reported(self, member: Member, status: Status) -> None:
        member.status = status
        worker_id = member.card.worker_id
        HF_PROCESSOR_RUNS.labels("worker", worker_id).set(status.hf_processor_runs)
        self._router.worker_reported(
            worker_id,
            running=status.running,
            waiting=status.waiting,
            queued_tokens=status.queued_tokens,
            kv_usage=status.kv_usage,
        )

    def _available(self) -> Iterator[Member]:
        for member in self._members.values():
            if member.link is not None and member.card.state is WorkerState.READY:
                yield member

    def _count(self) -> None:
        connected = sum(1 for _ in self._available())
        WORKERS.labels("connected").set(connected)
        WORKERS.labels("disconnected").set(len(self._members) - connected)
        WORKERS.labels("refused").set(len(self._refused))


def _routable(card: WorkerCard) -> RoutableWorker:
    return RoutableWorker(
        worker_id=card.worker_id,
        incarnation=card.incarnation,
        ranks=tuple(range(card.num_ranks)),
        block_size=card.cache.block_size,
        hash_algorithm=card.cache.hash_algorithm,
        none_hash=bytes.fromhex(card.cache.none_hash),
        event_sources=tuple(
            EventSource(
                source.rank,
                source.endpoint,
                source.replay_endpoint,
                source.topic,
                source.buffer_steps,
            )
            for source in card.kv_event_sources
        ),
        kv_tokens=card.capacity.num_blocks * card.cache.block_size,
        max_num_seqs=card.capacity.max_num_seqs,
        prefix_caching=card.cache.enable_prefix_caching,
    )
