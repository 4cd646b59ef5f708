"""Which workers there are, and a link to each.

Is told what discovery says, refuses cards that do not fit, has the others kept connected, and
answers what requests ask. All workers of a fleet serve the same model.

Discovery says whom to connect to; whether a worker lives is known from its link. So a
worker whose link lives stays, whatever became of its card. Several incarnations under one
worker id are told apart: the first that answers serves under it until it drains or is
lost, and another that answers meanwhile is refused by name and waits.
"""

import asyncio
import logging
from collections.abc import Iterator

from common.discovery.base import CardChange, CardGone, CardPresent, CardRefused
from common.errors import CardError, NoWorkerError, WorkerLostError
from common.fleet_key import FleetKey
from common.identity import Incarnation, Target, WorkerId
from common.observability.live_metrics import Row
from common.observability.telemetry import RANK_LOAD, RANK_REQUESTS, WORKERS
from common.request_plane.card import WorkerCard, WorkerState
from frontend.router import Router
from frontend.workers.adapters import Adapters
from frontend.workers.contract import Contract
from frontend.workers.keeper import Keeper
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender
from frontend.workers.members import Member, Members, Run
from frontend.workers.refusals import Refusals, nobody
from frontend.workers.serving import Serving

logger = logging.getLogger(__name__)


class Gauges:
    """Aggregate the metrics of fleets. Only the newest instance is exported."""

    def __init__(self) -> None:
        self._fleets: list[tuple[Members, Router]] = []
        self._refusals: list[Refusals] = []
        WORKERS.labels("connected").set_function(self._connected)
        WORKERS.labels("disconnected").set_function(
            lambda: sum(len(each.shown()) for each, _ in self._fleets) - self._connected()
        )
        WORKERS.labels("refused").set_function(
            lambda: sum(len(each.reasons()) for each in self._refusals)
        )
        RANK_LOAD.set_function(self._rank_load)
        RANK_REQUESTS.set_function(self._rank_requests)

    def add(
        self, refusals: Refusals, members: Members | None = None, router: Router | None = None
    ) -> None:
        """Include the refusals of a fleet, or of all, and the members and router of a fleet."""
        if members is not None and router is not None:
            self._fleets.append((members, router))
        self._refusals.append(refusals)

    def remove(self, refusals: Refusals, members: Members) -> None:
        """Exclude a fleet. Unknown ones are ignored."""
        self._fleets = [each for each in self._fleets if each[0] is not members]
        self._refusals = [each for each in self._refusals if each is not refusals]

    def _connected(self) -> int:
        return sum(1 for each, _ in self._fleets for _ in each.available())

    def _rank_requests(self) -> Iterator[Row]:
        for members, router in self._fleets:
            for member in members.available():
                for rank in member.card.ranks:
                    worker_id = member.card.worker_id
                    shares = router.load.shares(Target(worker_id, rank))
                    for whose, load in zip(("own", "others"), shares, strict=True):
                        yield Row((worker_id, str(rank), whose), (load.active,))

    def _rank_load(self) -> Iterator[Row]:
        for member in (one for each, _ in self._fleets for one in each.available()):
            for rank in member.status.ranks if member.status else ():
                labels = (member.card.worker_id, str(rank.rank))
                yield Row(labels, (rank.running, rank.waiting, rank.kv_usage))


class Fleet:
    """The workers of a model.

    Attributes:
        router: where requests run among them.
        contract: which cards fit.
        members: every run of a worker whose card does, and which of them serve.
        refusals: who is refused, and why.
    """

    def __init__(
        self,
        router: Router,
        media_sender: MediaSender,
        frontend_id: Incarnation,
        vllm_version: str,
        key: FleetKey | None = None,
        *,
        trust_remote_code: bool = False,
        gauges: Gauges | None = None,
    ) -> None:
        """
        Args:
            key: without one, workers must be on this host and have none either.
            trust_remote_code: whether models may bring code of their own, which would run here.
            gauges: shows who is there; together with other fleets if they have the same.
        """
        self.router = router
        self.contract = Contract(vllm_version, key, trust_remote_code=trust_remote_code)
        self.members = Members()
        self.refusals = Refusals()
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
        self._gauges = Gauges() if gauges is None else gauges
        self._gauges.add(self.refusals, self.members, router)

    @property
    def connected(self) -> bool:
        """Whether some worker can take a request now."""
        return any(True for _ in self.members.available())

    def link(self, worker_id: WorkerId) -> WorkerLink:
        """The link to whoever serves under a worker id.

        Raises:
            WorkerLostError: nobody does any more.
        """
        holder = self.members.holder(worker_id)
        if holder is None or holder.link is None:
            raise WorkerLostError(f"worker {worker_id} is not connected")
        return holder.link

    def check_available(self) -> None:
        """Raises NoWorkerError, with what is known of the reason, if nobody is there."""
        if self.connected:
            return
        if self._closed:
            raise NoWorkerError("this frontend is shutting down")
        raise nobody(self.refusals.reasons())

    def joined_since(self, worker_id: WorkerId, moment: float) -> bool:
        """Whether a worker came, or came back, after a moment: monotonic seconds."""
        holder = self.members.holder(worker_id)
        return holder is not None and holder.joined > moment

    @property
    def names(self) -> list[str]:
        """Under which users ask for the model; none until the first card has come."""
        first = self.contract.first
        return [] if first is None else first.served_model_names

    def expel(self, run: Run, reason: str) -> None:
        """Leave one run of a worker. Unknown ones are ignored."""
        member = self.members.get(run)
        if member is not None:
            self._keeper.remove(member, reason)

    def give_up(self, reason: str) -> None:
        """Leave every worker."""
        for member in self.members:
            self._keeper.remove(member, reason)

    @property
    def adapters(self) -> Adapters:
        """Those of the workers that serve."""
        return self._serving.adapters

    @property
    def arrival(self) -> asyncio.Event:
        """Set once the next worker has joined, or none will any more."""
        return self._serving.arrival

    @property
    def closed(self) -> bool:
        """Whether this frontend is shutting down."""
        return self._closed

    async def close(self) -> None:
        """Leave every worker. Requests that still run fail."""
        self._closed = True
        self._serving.arrival.set()
        await self._keeper.close("this frontend is shutting down")
        self._gauges.remove(self.refusals, self.members)

    def apply(self, change: CardChange) -> None:
        """Follow a change in discovery."""
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
            self.refusals.add(run, error)
            if member is not None:
                self._keeper.remove(member, str(error))
            return
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
            self._keeper.remove(member, "its card is gone")
        else:
            logger.warning(
                "the card of worker %s is gone, but its link lives: it stays", run.worker_id
            )
