"""A fleet over real sockets, with a discovery that says what a test says."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.discovery.base import CardChange, CardGone, CardWatcher
from common.identity import Incarnation, WorkerId
from common.request_plane.card import WorkerCard
from common.transfer.transports import TransferMode, receivers
from frontend.router.router import Router
from frontend.router.settings import RouterSettings
from frontend.workers.contract import Contract, Refusals
from frontend.workers.fleet import Fleet
from frontend.workers.fleets import Fleets, follow
from frontend.workers.gauges import show_workers
from frontend.workers.media_sender import MediaSender
from frontend.workers.members import Departures
from tests.fakes.cards import make_card
from tests.fakes.engine import ScriptedEngine, no_rendering


class Announcements(CardWatcher):
    """Changes as a test makes them."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[CardChange | Exception] = asyncio.Queue()

    def say(self, change: CardChange) -> None:
        self._queue.put_nowait(change)

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    async def changes(self) -> AsyncIterator[CardChange]:
        while True:
            change = await self._queue.get()
            if isinstance(change, Exception):
                raise change
            yield change


class Worker:
    """One run of a worker, without discovery."""

    def __init__(self, incarnation: str) -> None:
        self.engine = ScriptedEngine()
        self.incarnation = Incarnation(incarnation)
        self.service = WorkerService(
            self.engine,
            MediaReceiver(receivers(no_rendering)),
            WorkerId("w0"),
            self.incarnation,
            "tcp://127.0.0.1:0",
        )
        self._endpoint = self.service.endpoint
        self._serving: asyncio.Task[None] | None = asyncio.create_task(self.service.run())

    def card(self, worker_id: str = "w0", **changes: Any) -> WorkerCard:
        changes = {"incarnation": self.incarnation, **changes}
        return make_card(worker_id, request_endpoint=self._endpoint, **changes)

    async def close(self) -> None:
        if self._serving is None:
            return
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._serving = None
        await self.service.close()


class Town:
    """A fleet, and one worker that cards may point at; more may come."""

    def __init__(self, *, trust_remote_code: bool = False) -> None:
        self.news = Announcements()
        self.router = Router(RouterSettings())
        self.media_sender = MediaSender(None, TransferMode.AUTO)
        self.fleet = Fleet(
            self.router,
            self.media_sender,
            Incarnation("f"),
            "0.32.0",
            trust_remote_code=trust_remote_code,
        )
        show_workers([self.fleet], self.fleet.refusals, Departures())
        self.workers: list[Worker] = []
        self.worker = self.start("i0")
        self.following = asyncio.create_task(follow(self.news, self.fleet.apply))

    def start(self, incarnation: str) -> Worker:
        """Another run of the same worker."""
        self.workers.append(Worker(incarnation))
        return self.workers[-1]

    def card(self, worker_id: str = "w0", **changes: Any) -> WorkerCard:
        return self.worker.card(worker_id, **changes)

    def serving(self) -> Incarnation | None:
        """Which run of the worker serves, for the fleet and for the router alike."""
        routed = [worker.incarnation for worker in self.router.roster.workers.values()]
        if not self.fleet.connected:
            return None
        serving = self.fleet.link(WorkerId("w0")).card.incarnation
        return serving if routed == [serving] else None

    async def close(self) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)
        await self.fleet.close()
        await self.router.close()
        for worker in self.workers:
            await worker.close()
        self.media_sender.close()


class City:
    """Fleets of several models, and workers that cards may point at.

    Attributes:
        came: each fleet that came, with what is set once its last worker has left.
    """

    def __init__(self, *, most: int = 2) -> None:
        self.news = Announcements()
        self.media_sender = MediaSender(None, TransferMode.AUTO)
        self.came: list[tuple[Fleet, asyncio.Event]] = []
        self.fleets = Fleets(
            self._fleet,
            lambda fleet, gone: self.came.append((fleet, gone)),
            Contract("0.32.0"),
            most=most,
        )
        self._workers: list[Worker] = []
        self.following = asyncio.create_task(follow(self.news, self.fleets.apply))

    def _fleet(self, refusals: Refusals) -> Fleet:
        router = Router(RouterSettings())
        return Fleet(router, self.media_sender, Incarnation("f"), "0.32.0", refusals=refusals)

    def start(self, incarnation: str) -> Worker:
        """Another worker."""
        self._workers.append(Worker(incarnation))
        return self._workers[-1]

    def connected(self, model: str) -> set[WorkerId]:
        """Workers that serve a model, for the fleet and for its router alike."""
        fleet = self.fleets.of(model)
        if fleet is None:
            return set()
        names = {member.card.worker_id for member in fleet.members.available()}
        return names & set(fleet.router.roster.workers)

    async def let_go(self, fleet: Fleet) -> None:
        """As whoever serves a model does once it has left."""
        await fleet.close()
        await fleet.router.close()
        self.fleets.closed(fleet)

    async def close(self) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)
        await self.fleets.close()
        for fleet, _ in self.came:
            await self.let_go(fleet)
        for worker in self._workers:
            await worker.close()
        self.media_sender.close()


def gone(card: WorkerCard) -> CardGone:
    return CardGone(card.worker_id, card.incarnation)
