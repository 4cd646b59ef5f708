"""Which workers there are, and a link to each.

Follows discovery, refuses cards that do not fit, opens links, opens them again when
they are lost, and tells the router who can take requests.

Discovery says whom to connect to; whether a worker lives is known from its link. So a
worker whose link lives stays, whatever became of its card. Several incarnations under one
worker id are told apart: the first that answers serves under it until it drains or is
lost, and another that answers meanwhile is refused by name and waits.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from common.card import WorkerCard, WorkerState, check_compatible
from common.discovery.base import CardChange, CardGone, CardPresent, CardRefused, CardWatcher
from common.errors import (
    CardCodeError,
    CardError,
    CardIncompatibleError,
    CardNameError,
    ConfigurationError,
    DiscoveryError,
    NoWorkerError,
    ProtocolError,
    WorkerLostError,
)
from common.fleet_key import FleetKey
from common.fleet_sockets import check_card, frontend_context
from common.identity import Incarnation, WorkerId
from common.protocol import Status
from common.supervised import Work, once, supervise
from common.telemetry import HF_PROCESSOR_RUNS, INTERNAL_ERRORS, REFUSED_CARDS, WORKERS
from frontend.router import EventSource, RoutableWorker, Router
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5
RECONNECT_MAX_S = 8.0


_Run = tuple[WorkerId, Incarnation]
"""One run of a worker, as its card names it."""


@dataclass
class Member:
    """An incarnation of a worker with a card that fits.

    Attributes:
        link: None while it is not connected.
        present: whether its card is there.
        keeper: opens the link, again and again, until the card is gone and the link lost.
        leaving: why the link is closed, for the requests on it.
        joined: when the link was opened: monotonic seconds.
    """

    card: WorkerCard
    link: WorkerLink | None = None
    status: Status | None = None
    present: bool = True
    keeper: asyncio.Task[None] | None = None
    leaving: str = "this frontend is shutting down"
    joined: float = float("-inf")

    @property
    def run(self) -> _Run:
        """Which run of which worker this is."""
        return self.card.worker_id, self.card.incarnation


@dataclass
class _Name:
    """A worker id, under which one incarnation at a time serves.

    Attributes:
        holder: who serves under it.
        former: who did last.
        free: set while nobody does.
    """

    holder: Member | None = None
    former: Incarnation | None = None
    free: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    """The workers of this frontend."""

    def __init__(
        self,
        watcher: CardWatcher,
        router: Router,
        media_sender: MediaSender,
        frontend_id: Incarnation,
        vllm_version: str,
        key: FleetKey | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """
        Args:
            key: without one, workers must be on this host and have none either.
            trust_remote_code: whether models may bring code of their own, which would run here.
        """
        self._watcher = watcher
        self._router = router
        self._media_sender = media_sender
        self._frontend_id = frontend_id
        self._vllm_version = vllm_version
        self._members: dict[_Run, Member] = {}
        self._names: dict[WorkerId, _Name] = {}
        self._refused: dict[_Run, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._key = key
        self._trust_remote_code = trust_remote_code
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
        """The link to whoever serves under a worker id.

        Raises:
            WorkerLostError: nobody does any more.
        """
        holder = self._holder(worker_id)
        if holder is None or holder.link is None:
            raise WorkerLostError(f"worker {worker_id} is not connected")
        return holder.link

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
        holder = self._holder(worker_id)
        return holder is not None and holder.joined > moment

    @property
    def arrival(self) -> asyncio.Event:
        """Set once the next worker has joined, or none will any more."""
        return self._arrival

    @property
    def closed(self) -> bool:
        """Whether this frontend is shutting down."""
        return self._closed

    def members(self) -> list[Member]:
        """Every worker with a card that fits, connected or not.

        Of several incarnations under one worker id, those that are connected.
        """
        return [
            member
            for member in self._members.values()
            if member.link is not None or self._holder(member.card.worker_id) is None
        ]

    def refused(self) -> dict[WorkerId, str]:
        """Workers that were refused, with the reason."""
        reasons: dict[WorkerId, str] = {}
        for (worker_id, _), reason in self._refused.items():
            reasons[worker_id] = "; ".join(filter(None, [reasons.get(worker_id), reason]))
        return reasons

    async def run(self) -> None:
        """Follow discovery until cancelled.

        Raises:
            DiscoveryError: at first sight, cards can't be read or can't be trusted.
        """
        await supervise("discovery", self._follow, fatal=(DiscoveryError,))

    async def close(self) -> None:
        """Leave every worker. Requests that still run fail."""
        self._closed = True
        self._arrival.set()
        for member in list(self._members.values()):
            self._remove(member, "this frontend is shutting down")
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=200)  # ms: lets the goodbyes leave

    async def _follow(self) -> None:
        async for change in self._watcher.changes():
            try:
                self._apply(change)
            except Exception:  # counted; a card that we stumble over keeps no other worker out
                INTERNAL_ERRORS.labels("discovery").inc()
                logger.exception("a change in discovery was not followed: %r", change)
            self._count()

    def _apply(self, change: CardChange) -> None:
        match change:
            case CardPresent(card):
                self._card_present(card)
            case CardRefused(worker_id, incarnation, error):
                self._refuse((worker_id, incarnation), error)
            case CardGone(worker_id, incarnation):
                self._card_gone((worker_id, incarnation))

    def _card_present(self, card: WorkerCard) -> None:
        if self._closed:
            return
        run = card.worker_id, card.incarnation
        member = self._members.get(run)
        try:
            self._check(card)
        except CardError as error:
            logger.error("%s", error)
            self._refuse(run, error)
            if member is not None:
                self._remove(member, str(error))
            return
        if member is not None:
            member.card, member.present = card, True
            if member.link is not None:  # else it may be refused for its name
                self._refused.pop(run, None)
            if card.state is WorkerState.DRAINING:
                self._spawn("leaving a name", lambda: self._give_up_name(member))
        elif card.state is WorkerState.READY:
            self._refused.pop(run, None)
            if not self._contract.done():
                self._contract.set_result(card)
            self._add(Member(card))

    def _card_gone(self, run: _Run) -> None:
        member = self._members.get(run)
        if member is None or member.link is not None:
            self._refused.pop(run, None)
        if member is None:
            return
        member.present = False
        if member.link is None:
            self._remove(member, "its card is gone")
        else:
            logger.warning("the card of worker %s is gone, but its link lives: it stays", run[0])

    def _check(self, card: WorkerCard) -> None:
        check_card(card, self._key)
        if card.vllm_version != self._vllm_version:
            raise CardIncompatibleError(
                card.worker_id, "vllm_version", self._vllm_version, card.vllm_version
            )
        if card.model.trust_remote_code and not self._trust_remote_code:
            raise CardCodeError(
                f"worker {card.worker_id} refused: its model {card.model.model} brings code of "
                "its own, which would run in this frontend too; start the frontend with "
                "--trust-remote-code if you trust it"
            )
        if self._contract.done():
            check_compatible(self._contract.result(), card)

    def _refuse(self, run: _Run, error: CardError) -> None:
        self._refused[run] = str(error)
        REFUSED_CARDS.labels(error.field).inc()

    def _add(self, member: Member) -> None:
        self._members[member.run] = member
        self._names.setdefault(member.card.worker_id, _Name())
        keeping = supervise("worker keeper", lambda: self._keep(member), first_pause_s=RECONNECT_S)
        member.keeper = asyncio.create_task(keeping, name=f"keep-{member.card.worker_id}")
        self._tasks.add(member.keeper)
        member.keeper.add_done_callback(self._tasks.discard)
        member.keeper.add_done_callback(lambda _: self._forget_name(member.card.worker_id))

    def _remove(self, member: Member, reason: str) -> None:
        """Forget a member. Its keeper closes the link, and is not waited for."""
        if self._members.pop(member.run, None) is None:
            return
        logger.info("worker %s removed: %s", member.card.worker_id, reason)
        member.leaving = reason
        if member.keeper is not None and member.keeper is not asyncio.current_task():
            member.keeper.cancel()

    def _forget_name(self, worker_id: WorkerId) -> None:
        """Once the last incarnation under it is gone for good."""
        known = any(member.card.worker_id == worker_id for member in self._members.values())
        if not known and self._holder(worker_id) is None:
            self._names.pop(worker_id, None)
            self._router.ejection.forget(worker_id)

    async def _keep(self, member: Member) -> None:
        """Keep a link to a worker open until its card is gone and the link lost."""
        name = self._names[member.card.worker_id]
        pause = RECONNECT_S
        while member.present:
            taken = False
            try:
                async with self._linked(member) as link:
                    taken = member.card.state is WorkerState.READY and name.holder is not None
                    if not taken:
                        await self._join(member, name, link)
                        pause = RECONNECT_S
                        self._lost(member, await link.lost())
            except (WorkerLostError, ProtocolError, ConfigurationError) as error:
                logger.warning("%s", error)
            if taken:
                await self._wait_for_name(member, name)
            elif member.present:
                await asyncio.sleep(pause)
                pause = min(pause * 2, RECONNECT_MAX_S)
        self._remove(member, "its card is gone, and its link too")

    @contextlib.asynccontextmanager
    async def _linked(self, member: Member) -> AsyncIterator[WorkerLink]:
        """A link to a worker that has answered."""
        link = WorkerLink(
            member.card,
            self._context,
            self._frontend_id,
            lambda status: self._reported(member, status),
            self._router.settings.stall_s,
            lambda reply: self._answered(member, reply),
        )
        try:
            await link.open(self._media_sender.offer())
            yield link
        finally:
            member.link = None
            # Goes on if the keeper is cancelled meanwhile.
            await asyncio.shield(
                self._spawn("closing a link", lambda: self._close_link(member, link))
            )

    async def _close_link(self, member: Member, link: WorkerLink) -> None:
        await self._give_up_name(member)
        await link.close(member.leaving)
        if self._holder(member.card.worker_id) is None:
            self._media_sender.forget(member.card.worker_id)
        self._forget_name(member.card.worker_id)
        self._count()

    async def _join(self, member: Member, name: _Name, link: WorkerLink) -> None:
        """Serve under a name that nobody has; a worker that drains only keeps its link."""
        card = member.card
        member.link = link
        member.joined = time.monotonic()
        if card.state is WorkerState.DRAINING:
            return
        # From here to the router's knowing of it nothing is awaited that others could use.
        name.holder = member
        name.free.clear()
        if name.former != card.incarnation:
            self._router.ejection.forget(card.worker_id)
        choice = self._media_sender.connect(card.worker_id, link.reply, link.offer)
        await self._router.roster.add(_routable(card))
        self._arrival.set()
        self._arrival = asyncio.Event()
        self._count()
        logger.info("worker %s joined, media travel by %s", card.worker_id, choice.transport)

    async def _give_up_name(self, member: Member) -> None:
        name = self._names.get(member.card.worker_id)
        if name is None or name.holder is not member:
            return
        name.holder = None
        name.former = member.card.incarnation
        name.free.set()
        # Whoever waits for the name runs only after the router has forgotten this one.
        await self._router.roster.remove(member.card.worker_id)
        self._count()

    async def _wait_for_name(self, member: Member, name: _Name) -> None:
        """Another incarnation serves under the name, and both live."""
        if name.holder is None:
            return  # it has left since
        card, other = member.card, name.holder.card
        error = CardNameError(
            f"worker {card.worker_id} refused: process {card.host.pid} on {card.host.hostname} has "
            f"the same worker id as process {other.host.pid} on {other.host.hostname}, which "
            "serves under it; give each worker a --worker-id of its own, or stop one"
        )
        logger.error("%s", error)
        self._refuse(member.run, error)
        self._count()
        try:
            await name.free.wait()
        finally:
            if self._refused.get(member.run) == str(error):
                del self._refused[member.run]
                self._count()

    def _lost(self, member: Member, lost: WorkerLostError) -> None:
        logger.warning("%s", lost)
        card = member.card
        if lost.blames_worker and self._holder(card.worker_id) is member:
            self._router.ejection.eject(card.worker_id, card.incarnation, type(lost).__name__)

    def _holder(self, worker_id: WorkerId) -> Member | None:
        name = self._names.get(worker_id)
        return None if name is None else name.holder

    def _spawn(self, task: str, work: Work) -> "asyncio.Task[None]":
        spawned = asyncio.create_task(once(task, work, lambda _: None), name=task)
        self._tasks.add(spawned)
        spawned.add_done_callback(self._tasks.discard)
        return spawned

    def _reported(self, member: Member, status: Status) -> None:
        member.status = status
        worker_id = member.card.worker_id
        if self._holder(worker_id) is not member:
            return
        HF_PROCESSOR_RUNS.labels("worker", worker_id).set(status.hf_processor_runs)
        self._router.load.reported(
            worker_id,
            running=status.running,
            waiting=status.waiting,
            queued_tokens=status.queued_tokens,
            kv_usage=status.kv_usage,
        )

    def _answered(self, member: Member, reply: bytes) -> None:
        """A late answer of a former incarnation says nothing of the one that serves now."""
        if self._holder(member.card.worker_id) is member:
            self._media_sender.answered(member.card.worker_id, reply)

    def _available(self) -> Iterator[Member]:
        for name in self._names.values():
            if name.holder is not None and name.holder.link is not None:
                yield name.holder

    def _count(self) -> None:
        connected = sum(1 for _ in self._available())
        WORKERS.labels("connected").set(connected)
        WORKERS.labels("disconnected").set(len(self.members()) - connected)
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
