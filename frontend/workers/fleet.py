"""The workers of one model, with a task for each that keeps its link open.

Discovery says whom to connect to; the link says whether a worker lives. A worker with a live link
stays even without a card. It leaves when card and link are both gone, or when it is removed. One
incarnation serves under a worker id (``members.py``); another that answers meanwhile is refused by
name and waits.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from common.aio.supervised import Work, once, supervise
from common.backoff import Backoff
from common.discovery.base import CardChange, CardGone, CardPresent, CardRefused
from common.errors import (
    CardError,
    CardNameError,
    ConfigurationError,
    NoWorkerError,
    ProtocolError,
    WorkerLostError,
)
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.observability.fleet_events import What, note
from common.request_plane.card import WorkerCard, WorkerState
from common.request_plane.fleet_sockets import frontend_context
from common.transfer.base import Turns
from frontend.router import Router
from frontend.workers.adapters import Adapters
from frontend.workers.contract import Contract, Refusals, nobody
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender
from frontend.workers.members import Member, Members, Name, Run, Serving

logger = logging.getLogger(__name__)

_ONCE_MORE = WorkerState.DRAINING, WorkerState.READY
"""Impossible for an honest worker: a forged card said that it drains, and the worker has corrected
it."""


class Fleet:
    """The workers of a model: contract, members (all runs with a fitting card) and refusals."""

    def __init__(
        self,
        router: Router,
        media_sender: MediaSender,
        frontend_id: Incarnation,
        vllm_version: str,
        key: FleetKey | None = None,
        *,
        trust_remote_code: bool = False,
        refusals: Refusals | None = None,
    ) -> None:
        """Start without workers. Without a key, workers must be here and have none either."""
        self.router = router
        self.contract = Contract(vllm_version, key, trust_remote_code=trust_remote_code)
        self.members = Members()
        self.refusals = Refusals() if refusals is None else refusals
        self._serving = Serving(self.members, router, media_sender)
        self._keeper = Keeper(
            self.members,
            self._serving,
            self.refusals,
            media_sender,
            frontend_id,
            key,
            stall_s=router.settings.stall_s,
        )
        self._closed = False
        self.draining = False

    @property
    def connected(self) -> bool:
        return any(True for _ in self.members.available())

    def link(self, worker_id: WorkerId) -> WorkerLink:
        """Return the link to a serving worker. Raises WorkerLostError if there is none."""
        holder = self.members.holder(worker_id)
        if holder is None or holder.link is None:
            raise WorkerLostError(f"worker {worker_id} is not connected")
        return holder.link

    def check_available(self) -> None:
        """Raise NoWorkerError if no worker is connected."""
        if self.connected:
            return
        if self._closed:
            raise NoWorkerError("this frontend is shutting down")
        raise nobody(len(self.refusals.by_worker()))

    def joined_since(self, worker_id: WorkerId, moment: float) -> bool:
        holder = self.members.holder(worker_id)
        return holder is not None and holder.joined > moment

    @property
    def names(self) -> list[str]:
        """Names of the model for users; empty before the first card."""
        first = self.contract.first
        return [] if first is None else first.served_model_names

    def expel(self, run: Run, reason: str) -> None:
        member = self.members.get(run)
        if member is not None:
            self._keeper.remove(member, reason)

    def give_up(self, reason: str) -> None:
        for member in self.members:
            self._keeper.remove(member, reason)

    @property
    def adapters(self) -> Adapters:
        return self._serving.adapters

    @property
    def arrival(self) -> asyncio.Event:
        """Set once the next worker has joined, or when the fleet closes."""
        return self._serving.arrival

    @property
    def closed(self) -> bool:
        """Whether no worker will come any more: not for a draining frontend without any card."""
        return self._closed or (self.draining and not len(self.members))

    async def close(self) -> None:
        """Leave every worker. Running requests fail."""
        self._closed = True
        self._serving.arrival.set()
        await self._keeper.close("this frontend is shutting down")

    def apply(self, change: CardChange) -> None:
        match change:
            case CardPresent(card):
                self._card_present(card)
            case CardRefused(worker_id, incarnation, error):
                self.refusals.add(Run(worker_id, incarnation), error)
            case CardGone(worker_id, incarnation):
                self._card_gone(Run(worker_id, incarnation))

    def _card_present(self, card: WorkerCard) -> None:
        if self._closed:
            return
        run = Run(card.worker_id, card.incarnation)
        member = self.members.get(run)
        try:
            self.contract.check(card)
        except CardError as error:
            logger.error("%s", error)
            self.refusals.add(run, error, card)
            if member is not None:
                self._keeper.remove(member, str(error))
            return
        if member is not None and (member.card.state, card.state) == _ONCE_MORE:
            self._keeper.remove(member, "it takes requests again, over another link")
            member = None
        if member is not None:
            member.card, member.present = card, True
            if member.link is not None:  # else it may be refused for its name
                self.refusals.take_back(run)
            if card.state is WorkerState.DRAINING:
                self._keeper.drain(member)
        elif card.state is WorkerState.READY:
            self.refusals.take_back(run)
            self.contract.settle(card)
            self._keeper.add(Member(card))

    def _card_gone(self, run: Run) -> None:
        member = self.members.get(run)
        if member is None or member.link is not None:
            self.refusals.take_back(run)
        if member is None:
            return
        member.present = False
        if member.link is None:
            self._keeper.depart(member, "its card is gone")
        else:
            logger.warning("worker %s has no card but a live link; keeping it", run.worker_id)


RECONNECT_S = 0.5
RECONNECT_MAX_S = 8.0


class Keeper:
    """Supervisor of the links: opens, reopens and closes them."""

    def __init__(
        self,
        members: Members,
        serving: Serving,
        refusals: Refusals,
        media_sender: MediaSender,
        frontend_id: Incarnation,
        key: FleetKey | None,
        *,
        stall_s: float,
    ) -> None:
        """Give up a worker that is silent on all of its requests for ``stall_s``."""
        self._members = members
        self._serving = serving
        self._refusals = refusals
        self._media_sender = media_sender
        self._frontend_id = frontend_id
        self._stall_s = stall_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = Turns()
        self._context = frontend_context(key)

    def add(self, member: Member) -> None:
        self._members.add(member)
        keeping = supervise("worker keeper", lambda: self._keep(member), first_pause_s=RECONNECT_S)
        member.keeper = asyncio.create_task(keeping, name=f"keep-{member.card.worker_id}")
        self._tasks.add(member.keeper)
        member.keeper.add_done_callback(self._tasks.discard)
        forget_name = self._serving.forget_name
        member.keeper.add_done_callback(lambda _: forget_name(member.card.worker_id))

    def remove(self, member: Member, reason: str) -> None:
        """Forget a member. Its keeper task closes the link in the background."""
        if not self._members.remove(member):
            return
        worker_id, host = member.card.worker_id, member.card.host
        if self._members.holder(worker_id) not in (None, member):
            refused = f"the refused process {host.pid} on {host.hostname} of the same worker id"
            reason = f"{refused}; {worker_id} itself serves on ({reason})"
        logger.info("worker %s removed: %s", worker_id, reason)
        note(What.REMOVED, worker_id, reason)
        member.leaving = reason
        if member.keeper is not None and member.keeper is not asyncio.current_task():
            member.keeper.cancel()

    def depart(self, member: Member, reason: str) -> None:
        """Forget a member without card and link, but keep the reason for its departure."""
        gone = member.gone or member.departure(reason, left=True)
        if self._members.holder(member.card.worker_id) in (None, member):
            self._members.departures.add(gone)
        self.remove(member, gone.reason if gone.left else reason)

    def drain(self, member: Member) -> None:
        self._spawn("leaving a name", lambda: self._serving.give_up_name(member))

    async def close(self, reason: str) -> None:
        for member in self._members:
            self.remove(member, reason)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=200)  # ms: lets the goodbyes leave

    async def _keep(self, member: Member) -> None:
        name = self._members.names[member.card.worker_id]
        backoff = Backoff(RECONNECT_S, RECONNECT_MAX_S)
        while member.present:
            taken = False
            try:
                async with self._linked(member) as link:
                    taken = member.card.state is WorkerState.READY and name.holder is not None
                    if not taken:
                        await self._serving.join(member, name, link)
                        backoff.reset()
                        self._serving.lost(member, await link.lost(), left=link.left)
            except (WorkerLostError, ProtocolError, ConfigurationError) as error:
                logger.warning("%s", error)
            if taken:
                await self._wait_for_name(member, name)
            elif member.present:
                await asyncio.sleep(backoff.next_s())
        self.depart(member, "its card is gone, and its link too")

    @contextlib.asynccontextmanager
    async def _linked(self, member: Member) -> AsyncIterator[WorkerLink]:
        await self._turns.mine()  # hundreds of dead workers may be retried at once
        link = WorkerLink(
            member.card,
            self._context,
            self._frontend_id,
            lambda status: self._serving.reported(member, status),
            self._stall_s,
            lambda reply: self._serving.answered(member, reply),
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
        await self._serving.give_up_name(member)
        await link.close(member.leaving)
        self._serving.link_closed(member.card.worker_id)

    async def _wait_for_name(self, member: Member, name: Name) -> None:
        if name.holder is None:
            return  # it has left since
        card, other = member.card, name.holder.card
        error = CardNameError(
            f"worker {card.worker_id} refused: process {card.host.pid} on {card.host.hostname} has "
            f"the same worker id as process {other.host.pid} on {other.host.hostname}, which "
            "serves under it; give each worker a --worker-id of its own, or stop one"
        )
        logger.error("%s", error)
        self._refusals.add(member.run, error, card)
        try:
            await name.free.wait()
        finally:
            self._refusals.take_back_if(member.run, error)

    def _spawn(self, task: str, work: Work) -> "asyncio.Task[None]":
        spawned = asyncio.create_task(once(task, work, lambda _: None), name=task)
        self._tasks.add(spawned)
        spawned.add_done_callback(self._tasks.discard)
        return spawned
