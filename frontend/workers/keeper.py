"""Keeping members connected: each has a task that opens its link, again and again.

A member is kept until its card is gone and its link lost, or until it is removed. One that
answers while another incarnation serves under its worker id is refused by name and waits.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from common.aio.supervised import Work, once, supervise
from common.backoff import Backoff
from common.errors import CardNameError, ConfigurationError, ProtocolError, WorkerLostError
from common.fleet_key import FleetKey
from common.identity import Incarnation
from common.request_plane.card import WorkerState
from common.request_plane.fleet_sockets import frontend_context
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender
from frontend.workers.members import Member, Members, Name
from frontend.workers.refusals import Refusals
from frontend.workers.serving import Serving

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5
RECONNECT_MAX_S = 8.0


class Keeper:
    """Opens links to members, opens them again when they are lost, and closes them."""

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
        """
        Args:
            stall_s: silence on all of its requests for which a worker is given up.
        """
        self._members = members
        self._serving = serving
        self._refusals = refusals
        self._media_sender = media_sender
        self._frontend_id = frontend_id
        self._stall_s = stall_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = frontend_context(key)

    @property
    def tasks(self) -> int:
        """One for each member, and those that give up names and close links."""
        return len(self._tasks)

    def add(self, member: Member) -> None:
        """Keep another member connected."""
        self._members.add(member)
        keeping = supervise("worker keeper", lambda: self._keep(member), first_pause_s=RECONNECT_S)
        member.keeper = asyncio.create_task(keeping, name=f"keep-{member.card.worker_id}")
        self._tasks.add(member.keeper)
        member.keeper.add_done_callback(self._tasks.discard)
        forget_name = self._serving.forget_name
        member.keeper.add_done_callback(lambda _: forget_name(member.card.worker_id))

    def remove(self, member: Member, reason: str) -> None:
        """Forget a member. Its keeper closes the link, and is not waited for."""
        if not self._members.remove(member):
            return
        logger.info("worker %s removed: %s", member.card.worker_id, reason)
        member.leaving = reason
        if member.keeper is not None and member.keeper is not asyncio.current_task():
            member.keeper.cancel()

    def drain(self, member: Member) -> None:
        """Let a member serve no longer. Its link stays; the router is not waited for."""
        self._spawn("leaving a name", lambda: self._serving.give_up_name(member))

    async def close(self, reason: str) -> None:
        """Remove every member, and wait until their links are closed."""
        for member in self._members:
            self.remove(member, reason)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=200)  # ms: lets the goodbyes leave

    async def _keep(self, member: Member) -> None:
        """Keep a link to a worker open until its card is gone and the link lost."""
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
                        self._serving.lost(member, await link.lost())
            except (WorkerLostError, ProtocolError, ConfigurationError) as error:
                logger.warning("%s", error)
            if taken:
                await self._wait_for_name(member, name)
            elif member.present:
                await asyncio.sleep(backoff.next_s())
        self.remove(member, "its card is gone, and its link too")

    @contextlib.asynccontextmanager
    async def _linked(self, member: Member) -> AsyncIterator[WorkerLink]:
        """A link to a worker that has answered."""
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
        self._refusals.add(member.run, error)
        try:
            await name.free.wait()
        finally:
            self._refusals.take_back_if(member.run, error)

    def _spawn(self, task: str, work: Work) -> "asyncio.Task[None]":
        spawned = asyncio.create_task(once(task, work, lambda _: None), name=task)
        self._tasks.add(spawned)
        spawned.add_done_callback(self._tasks.discard)
        return spawned
