"""The process that keeps an arena for others: who leases what, and what a lost one leaves.

Whoever uses the arena maps all of it and reads and writes there by itself; here is only said who
may. For one event loop, which nothing here keeps waiting: who waits is answered later.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from common.errors import ArenaFullError, ArenaUnavailableError
from common.identity import MmHash
from common.transfer.arena import Arena, Lease, ReservedSegment, SegmentLayout
from common.transfer.shared_arena.messages import GaveBack, GiveBack
from common.transfer.shared_arena.names import Claims, MediaNames
from common.transfer.shared_arena.session import Session

logger = logging.getLogger(__name__)

QUARANTINE_S: Final = 45.0
"""For how long nobody else gets the memory of a process that is gone. Its workers notice after
15 s of silence at most, then end its requests and let their engines settle; helpers of its own
that were writing end with it."""

GIVE_BACK_S: Final = 0.25
"""How long a process may take to give back what it leases for later."""


class ArenaKeeper:
    """An arena, and the processes that use it."""

    def __init__(self, arena: Arena, *, quarantine_s: float = QUARANTINE_S) -> None:
        """
        Args:
            arena: of this process, which closes it.
        """
        self.arena = arena
        self.names = MediaNames()
        self.claims = Claims()
        self._quarantine_s = quarantine_s
        self._sessions: set[Session] = set()
        self._writing: dict[MmHash, list[Callable[[], None]]] = {}
        self._asked: set[Session] = set()
        self._for_room: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def users(self) -> int:
        """How many processes use it now."""
        return len(self._sessions)

    async def attach(self, end: socket.socket) -> None:
        """Let whoever has the other end of a pair use the arena, until that is closed."""
        session = Session(self)
        self._sessions.add(session)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: session.protocol, end)

    def reserve(
        self, session: Session, number: int, mm_hash: MmHash, layout: SegmentLayout
    ) -> None:
        """Answer a request for room, now or later."""
        again = partial(self.reserve, session, number, mm_hash, layout)
        self._try_to_reserve(session, number, mm_hash, layout, again, last=False)

    def _try_to_reserve(
        self,
        session: Session,
        number: int,
        mm_hash: MmHash,
        layout: SegmentLayout,
        again: Callable[[], None],
        *,
        last: bool,
    ) -> None:
        if not session.alive:
            return
        try:
            found = self.arena.reserve_now(mm_hash, layout)
        except ArenaUnavailableError as error:
            session.refuse(number, str(error))
        except ArenaFullError as error:
            if last:
                session.refuse(number, str(error))
            else:
                retry = partial(
                    self._try_to_reserve, session, number, mm_hash, layout, again, last=True
                )
                self._make_room(retry)
        else:
            if found is None:
                self._writing.setdefault(mm_hash, []).append(again)
            elif isinstance(found, Lease):
                session.grant(number, found)
            else:
                session.give_room(number, mm_hash, found)

    def written(self, mm_hash: MmHash) -> None:
        """Somebody has written an item, or won't."""
        for again in self._writing.pop(mm_hash, []):
            again()

    def _make_room(self, then: Callable[[], None]) -> None:
        """Have all processes give back what they lease for later, and go on."""
        self._for_room.append(then)
        if self._timer is not None:
            return
        self._timer = asyncio.get_running_loop().call_later(GIVE_BACK_S, self._room_made)
        self._asked = set(self._sessions)
        for session in self._asked:
            session.protocol.send(GiveBack())

    def gave_back(self, session: Session, _: GaveBack | None = None) -> None:
        """A process has given back what it could, or is gone."""
        self._asked.discard(session)
        if not self._asked and self._timer is not None:
            self._room_made()

    def _room_made(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        waiting, self._for_room = self._for_room, []
        for then in waiting:
            then()

    def clear(self, by: Session) -> None:
        """Nobody knows any more what was kept until now."""
        self.arena.drop_notes()
        self.names.clear()
        for session in self._sessions - {by}:
            session.forget()

    def lost(self, session: Session, leases: list[Lease], rooms: list[ReservedSegment]) -> None:
        """A process is gone, whether it was killed or has ended.

        Its workers may still read what it leased to them, and its helpers write, so that memory
        is nobody's for a while. The items themselves others may lease, or write elsewhere.
        """
        self._sessions.discard(session)
        segments = [room.taken_over() for room in rooms]
        for segment in segments:
            self.arena.withdraw(segment)

        def give_back() -> None:
            for lease in leases:
                lease.release()
            for segment in segments:
                self.arena.free_withdrawn(segment)

        if leases or segments:
            asyncio.get_running_loop().call_later(self._quarantine_s, give_back)
        for segment in segments:
            self.written(segment.mm_hash)
        self.claims.end_all(session)
        self.gave_back(session)
