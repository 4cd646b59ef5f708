"""Membership: every incarnation with a fitting card, and which of them serves.

The first incarnation that answers under a worker id serves, until it drains or is lost. Router and
media sender know workers by id only, so reports of other incarnations are kept from them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from common.errors import WorkerLostError
from common.identity import Incarnation, Target, WorkerId
from common.lru import Lru
from common.observability.fleet_events import What, note
from common.observability.telemetry import HF_PROCESSOR_RUNS, forget_worker
from common.request_plane.card import Adapter, WorkerCard, WorkerState
from common.request_plane.operations import Condition
from common.request_plane.protocol import HeldAdapter, Status
from frontend.router import EventSource, RoutableWorker, Router
from frontend.workers.adapters import Adapters, key_of
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    worker_id: WorkerId
    incarnation: Incarnation


class Departure(NamedTuple):
    """The end of a worker, at epoch seconds. ``left`` if it announced its shutdown, or withdrew its
    card without a link; otherwise it was lost. Its card, which may have a megabyte, is not kept.
    """

    run: Run
    model: str
    request_endpoint: str
    at: float
    reason: str
    left: bool


MAX_DEPARTURES: Final = 256
DEPARTURES_SHOWN_S: Final = 3600.0


class Departures:
    """The last workers that left and have not returned."""

    def __init__(self) -> None:
        self._by_worker: Lru[WorkerId, Departure] = Lru(MAX_DEPARTURES)

    def add(self, departure: Departure) -> None:
        self._by_worker.put(departure.run.worker_id, departure)

    def returned(self, worker_id: WorkerId) -> None:
        self._by_worker.pop(worker_id)

    def recent(self) -> list[Departure]:
        since = time.time() - DEPARTURES_SHOWN_S
        found = map(self._by_worker.peek, self._by_worker)
        return [each for each in found if each is not None and each.at > since]


@dataclass
class Member:
    """An incarnation of a worker with a fitting card.

    Attributes:
        link: None while it is not connected.
        present: whether its card is there.
        keeper: reopens the link until the card is gone and the link lost.
        leaving: why the link is closed, for the requests on it.
        joined: when the link was opened: monotonic seconds.
        gone: how it lost its last link, until it has another.
        media_emptied: how often an operator cleared its media, as last reported; kept across links,
            as the media are.
        adapters: as last reported, at first by its card.
        active_adapters: names of those that its engine used last.
    """

    card: WorkerCard
    link: WorkerLink | None = None
    status: Status | None = None
    present: bool = True
    keeper: asyncio.Task[None] | None = None
    leaving: str = "this frontend is shutting down"
    joined: float = float("-inf")
    gone: Departure | None = None
    media_emptied: int | None = None
    adapters: Sequence[Adapter] = ()
    active_adapters: Sequence[str] = ()

    @property
    def run(self) -> Run:
        return Run(self.card.worker_id, self.card.incarnation)

    def departure(self, reason: str, *, left: bool) -> Departure:
        model, endpoint = self.card.served_model_names[0], self.card.request_endpoint
        return Departure(self.run, model, endpoint, time.time(), reason, left)


@dataclass
class Name:
    """A worker id, with its serving member, the one before, and an event set while it is free."""

    holder: Member | None = None
    former: Incarnation | None = None
    free: asyncio.Event = field(default_factory=asyncio.Event)


class Roll(Protocol):
    """Membership of one or several fleets."""

    def holder(self, worker_id: WorkerId) -> Member | None: ...

    def available(self) -> Iterator[Member]: ...

    def shown(self) -> list[Member]: ...


class Members:
    """Members by run, and their worker ids (``names``), kept until the last member is gone for
    good. ``left`` is called when a member was removed or a name forgotten.
    """

    def __init__(self) -> None:
        self._members: dict[Run, Member] = {}
        self.names: dict[WorkerId, Name] = {}
        self.left: Callable[[], None] = lambda: None
        self.departures = Departures()

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, run: Run) -> Member | None:
        return self._members.get(run)

    def add(self, member: Member) -> None:
        """Add a run, replacing the same run, and create its worker's name."""
        self._members[member.run] = member
        self.names.setdefault(member.card.worker_id, Name())

    def remove(self, member: Member) -> bool:
        """Forget a member and return whether it was known. It gives up its name later."""
        known = self._members.pop(member.run, None) is not None
        self.left()
        return known

    def forget_name(self, worker_id: WorkerId) -> bool:
        """Forget a name if its last incarnation is gone for good; return whether it is."""
        known = any(member.card.worker_id == worker_id for member in self._members.values())
        if known or self.holder(worker_id) is not None:
            return False
        self.names.pop(worker_id, None)
        self.left()
        return True

    def holder(self, worker_id: WorkerId) -> Member | None:
        name = self.names.get(worker_id)
        return None if name is None else name.holder

    def serves(self, member: Member) -> bool:
        return self.holder(member.card.worker_id) is member

    def available(self) -> Iterator[Member]:
        for name in self.names.values():
            if name.holder is not None and name.holder.link is not None:
                yield name.holder

    def shown(self) -> list[Member]:
        """Return the workers; of several incarnations under one id, the connected ones."""
        return [
            member
            for member in self._members.values()
            if member.link is not None or self.holder(member.card.worker_id) is None
        ]


OTHERS_S = 0.005
"""Time limit per report for noting requests of other frontends: the event loop waits."""

SHOWN_S: Final = 120.0
"""Time for which metrics of a departed worker stay, so that scrapers get the last values."""


class Serving:
    """Keep router and media sender informed; ``arrival`` is set once the next worker has joined."""

    def __init__(self, members: Members, router: Router, media_sender: MediaSender) -> None:
        self._members = members
        self._router = router
        self._media_sender = media_sender
        self.arrival = asyncio.Event()
        self.adapters = Adapters()

    async def join(self, member: Member, name: Name, link: WorkerLink) -> None:
        """Serve under a free name; a draining worker only keeps its link."""
        card = member.card
        member.link = link
        member.joined = time.monotonic()
        member.gone = None
        self._members.departures.returned(card.worker_id)
        if card.state is WorkerState.DRAINING:
            return
        # No await between here and the router's add that could let another task see half of this.
        name.holder = member
        name.free.clear()
        member.status = None  # it belongs to an earlier link
        member.adapters, member.active_adapters = card.adapters, ()
        if name.former != card.incarnation:
            self._router.ejection.forget(card.worker_id)
        choice = self._media_sender.connect(card.worker_id, link.reply, link.offer)
        await self._router.roster.add(_routable(card))
        self._show_adapters(member)  # a report may have changed them
        self.arrival.set()
        self.arrival = asyncio.Event()
        logger.info("worker %s joined, media travel by %s", card.worker_id, choice.transport)
        note(What.JOINED, card.worker_id, f"media travel by {choice.transport}")

    async def give_up_name(self, member: Member) -> None:
        """Stop serving, if it does; its link stays."""
        name = self._members.names.get(member.card.worker_id)
        if name is None or name.holder is not member:
            return
        name.holder = None
        name.former = member.card.incarnation
        name.free.set()
        self.adapters.left(member.card.worker_id)
        self._router.resting.discard(member.card.worker_id)
        # Tasks that wait for the name run only after the router has forgotten this member.
        await self._router.roster.remove(member.card.worker_id)

    def link_closed(self, worker_id: WorkerId) -> None:
        """Send no more media to a worker, unless a successor serves under its id."""
        if self._members.holder(worker_id) is None:
            self._media_sender.forget(worker_id)
        self.forget_name(worker_id)

    def forget_name(self, worker_id: WorkerId) -> None:
        """Drop the records of a name whose last incarnation is gone for good."""
        if self._members.forget_name(worker_id):
            self._router.ejection.forget(worker_id)
            self._router.roster.forget(worker_id)
            self._router.drained.pop(worker_id, None)
            asyncio.get_running_loop().call_later(SHOWN_S, self._show_no_more, worker_id)

    def _show_no_more(self, worker_id: WorkerId) -> None:
        if worker_id not in self._members.names:  # else it came back
            forget_worker(worker_id)

    def reported(self, member: Member, status: Status) -> None:
        """Take a worker's load, condition and requests of other frontends."""
        before = member.status
        member.status = status
        told = _note_adapters(member, status)
        if not self._members.serves(member):
            return
        if told:
            self._show_adapters(member)
        worker_id = member.card.worker_id
        if status.condition is Condition.SERVING:
            self._router.resting.discard(worker_id)
        else:
            self._router.resting.add(worker_id)
        if before is None or before.blocks_emptied != status.blocks_emptied:
            self._router.roster.blocks_emptied(worker_id, status.blocks_emptied)
        if member.media_emptied not in (None, status.media_emptied):
            self._router.roster.media_emptied(worker_id)
        member.media_emptied = status.media_emptied
        HF_PROCESSOR_RUNS.labels("worker", worker_id).set(status.hf_processor_runs)
        self._router.roster.stepped(worker_id, status.steps)
        self._router.load.reported(worker_id, status.ranks)
        until = time.monotonic() + OTHERS_S
        for one in reversed(status.coming):  # newest first: the oldest are dropped
            target = Target(worker_id, one.rank)
            self._router.in_flight.others_sent(target, one.new_blocks, one.media)
            if time.monotonic() > until:
                break

    def _show_adapters(self, member: Member) -> None:
        worker_id = member.card.worker_id
        self.adapters.changed(worker_id, member.adapters)
        self._router.roster.adapters_changed(
            worker_id, frozenset(map(key_of, member.adapters)), frozenset(member.active_adapters)
        )

    def answered(self, member: Member, reply: bytes) -> None:
        """Take a transfer reply, unless it is a late one of a former incarnation."""
        if self._members.serves(member):
            self._media_sender.answered(member.card.worker_id, reply)

    def lost(self, member: Member, lost: WorkerLostError, *, left: bool) -> None:
        """Keep why a link was lost; eject the worker if it is to blame."""
        worker_id = member.card.worker_id
        if left:
            reason = "it is shutting down"
            logger.info("worker %s is leaving: %s", worker_id, reason)
        else:
            reason = str(lost).removeprefix(f"worker {worker_id} was lost: ")
            logger.warning("%s", lost)
            note(What.LOST, worker_id, str(lost))
        member.gone = member.departure(reason, left=left)
        if lost.blame and self._members.serves(member):
            run = member.run
            self._router.ejection.eject(run.worker_id, run.incarnation, lost.blame)


def _routable(card: WorkerCard) -> RoutableWorker:
    return RoutableWorker(
        worker_id=card.worker_id,
        incarnation=card.incarnation,
        ranks=tuple(card.ranks),
        block_size=card.cache.block_size,
        hash_algorithm=card.cache.hash_algorithm,
        none_hash=bytes.fromhex(card.cache.none_hash),
        event_sources=tuple(
            EventSource(source.rank, source.endpoint, source.replay_endpoint, source.topic)
            for source in card.kv_event_sources
            if source.replay_endpoint is not None
        ),
        kv_tokens=card.capacity.num_blocks * card.cache.block_size,
        max_num_seqs=card.capacity.max_num_seqs,
        encoder_tokens=card.capacity.encoder_cache_tokens,
        prefix_caching=card.cache.enable_prefix_caching,
        drops_last_block=card.reuse.drops_last_block,
        drops_in_windows=card.reuse.drops_in_windows,
        keeps_tails=card.reuse.keeps_tails,
        adapters=frozenset(map(key_of, card.adapters)),
    )


def _note_adapters(member: Member, status: Status) -> bool:
    if status.adapters is not None:
        member.adapters = [_adapter(held) for held in status.adapters]
    if status.active_adapters is not None:
        member.active_adapters = status.active_adapters
    return status.adapters is not None or status.active_adapters is not None


def _adapter(held: HeldAdapter) -> Adapter:
    return Adapter(
        name=held.name,
        path=held.path,
        base_model_name=held.base_model_name,
        is_3d_lora_weight=held.is_3d_lora_weight,
    )
