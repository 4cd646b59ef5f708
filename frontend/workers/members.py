"""Who is there: every incarnation with a card that fits, and which of them serves.

Several incarnations under one worker id are told apart: at most one of them serves under it.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.identity import Incarnation, WorkerId
from common.request_plane.card import Adapter, WorkerCard
from common.request_plane.protocol import Status
from frontend.workers.link import WorkerLink


class Run(NamedTuple):
    """One run of a worker, as its card names it."""

    worker_id: WorkerId
    incarnation: Incarnation


@dataclass
class Member:
    """An incarnation of a worker with a card that fits.

    Attributes:
        link: None while it is not connected.
        present: whether its card is there.
        keeper: opens the link, again and again, until the card is gone and the link lost.
        leaving: why the link is closed, for the requests on it.
        joined: when the link was opened: monotonic seconds.
        media_emptied: how often an operator had its media forgotten, as it said last; kept from
            link to link, as the media are.
        adapters: that it has, as it said last: on its card, or later.
        active_adapters: names of those that its engine used last.
    """

    card: WorkerCard
    link: WorkerLink | None = None
    status: Status | None = None
    present: bool = True
    keeper: asyncio.Task[None] | None = None
    leaving: str = "this frontend is shutting down"
    joined: float = float("-inf")
    media_emptied: int | None = None
    adapters: Sequence[Adapter] = ()
    active_adapters: Sequence[str] = ()

    @property
    def run(self) -> Run:
        """Which run of which worker this is."""
        return Run(self.card.worker_id, self.card.incarnation)


@dataclass
class Name:
    """A worker id, under which one incarnation at a time serves.

    Attributes:
        holder: who serves under it.
        former: who did last.
        free: set while nobody does.
    """

    holder: Member | None = None
    former: Incarnation | None = None
    free: asyncio.Event = field(default_factory=asyncio.Event)


class Roll(Protocol):
    """Who is there, in one fleet or in several."""

    def holder(self, worker_id: WorkerId) -> Member | None:
        """Who serves under a worker id, even if it was removed and is about to leave."""

    def available(self) -> Iterator[Member]:
        """Those who can take a request now."""

    def shown(self) -> list[Member]:
        """Every worker with a card that fits, connected or not."""


class Members:
    """The members by their runs, and the names that they have.

    Attributes:
        names: by worker id, until the last that had the name is gone for good.
        left: called when one was removed, or a name is free for others.
    """

    def __init__(self) -> None:
        self._members: dict[Run, Member] = {}
        self.names: dict[WorkerId, Name] = {}
        self.left: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, run: Run) -> Member | None:
        """The member that is a run, if there is one."""
        return self._members.get(run)

    def add(self, member: Member) -> None:
        """Another run, in place of what was known of the same one; its worker has a name now."""
        self._members[member.run] = member
        self.names.setdefault(member.card.worker_id, Name())

    def remove(self, member: Member) -> bool:
        """Forget a member; a name that it holds it gives up later. Whether it was there."""
        known = self._members.pop(member.run, None) is not None
        self.left()
        return known

    def forget_name(self, worker_id: WorkerId) -> bool:
        """Once the last incarnation under it is gone for good. Whether it is."""
        known = any(member.card.worker_id == worker_id for member in self._members.values())
        if known or self.holder(worker_id) is not None:
            return False
        self.names.pop(worker_id, None)
        self.left()
        return True

    def holder(self, worker_id: WorkerId) -> Member | None:
        """Who serves under a worker id, even if it was removed and is about to leave."""
        name = self.names.get(worker_id)
        return None if name is None else name.holder

    def serves(self, member: Member) -> bool:
        """Whether it is this one who serves under its worker id."""
        return self.holder(member.card.worker_id) is member

    def available(self) -> Iterator[Member]:
        """Those who can take a request now."""
        for name in self.names.values():
            if name.holder is not None and name.holder.link is not None:
                yield name.holder

    def shown(self) -> list[Member]:
        """Every worker with a card that fits, connected or not.

        Of several incarnations under one worker id, those that are connected.
        """
        return [
            member
            for member in self._members.values()
            if member.link is not None or self.holder(member.card.worker_id) is None
        ]
