"""The process that keeps an arena for others: who leases what, and what a lost one leaves.

Whoever uses the arena maps all of it and reads and writes there by itself; here is only said who
may. For one event loop, which nothing here keeps waiting: who waits is answered later.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Final

from common.aio.ipc import FrameProtocol
from common.errors import ArenaFullError, ArenaUnavailableError
from common.identity import MmHash
from common.transfer.arena import Arena, Lease, ReservedSegment, SegmentLayout
from common.transfer.shared_arena import messages
from common.transfer.shared_arena.media_claims import HASHES_KEPT, Claims, MediaNames
from common.transfer.shared_arena.messages import (
    Forget,
    GaveBack,
    GiveBack,
    Granted,
    Nothing,
    Recalled,
    Refused,
    Room,
    ToKeeper,
)

logger = logging.getLogger(__name__)

QUARANTINE_S: Final = 45.0
"""For how long nobody else gets the memory of a process that is gone. Its workers notice after
15 s of silence at most, then end its requests and let their engines settle; helpers of its own
that were writing end with it."""

GIVE_BACK_S: Final = 0.25  # how long a process may take to give back what it leases for later


_HASHES = b""  # space of the hashes that media had, by what makes them alike


class Session:
    """What one process has of the arena."""

    def __init__(self, keeper: "ArenaKeeper") -> None:
        self._keeper = keeper
        self._tokens = count(1)
        self._leases: dict[int, Lease] = {}
        self._rooms: dict[int, ReservedSegment] = {}
        self.alive = True
        self.protocol: FrameProtocol[ToKeeper] = FrameProtocol(ToKeeper, self._received, self._lost)

    def grant(self, number: int, lease: Lease) -> None:
        """Answer with a lease, which is the process's from now on."""
        token = next(self._tokens)
        self._leases[token] = lease
        note = lease.note
        self.protocol.send(
            Granted(
                number,
                token,
                lease.mm_hash,
                lease.offset,
                lease.generation,
                lease.layout.envelope_size,
                lease.layout.buffer_sizes,
                note if isinstance(note, bytes) else b"",
            )
        )

    def give_room(self, number: int, mm_hash: str, room: ReservedSegment) -> None:
        """Answer with room, which is the process's from now on."""
        token = next(self._tokens)
        self._rooms[token] = room
        self.protocol.send(Room(number, token, room.offset, room.generation))

    def refuse(self, number: int, reason: str) -> None:
        self.protocol.send(Refused(number, reason))

    def forget(self) -> None:
        self.protocol.send(Forget())

    def _lost(self) -> None:
        self.alive = False
        self._keeper.lost(self, [*self._leases.values()], [*self._rooms.values()])

    def _received(self, message: ToKeeper) -> None:
        match message:
            case messages.LeaseItem(number, mm_hash):
                self._grant_if_any(number, self._keeper.arena.lease(mm_hash))
            case messages.Reserve(number, mm_hash, envelope_size, buffer_sizes):
                layout = SegmentLayout(envelope_size, buffer_sizes)
                self._keeper.reserve(self, number, mm_hash, layout)
            case messages.Complete(token, note):
                self._leases[token] = lease = self._rooms.pop(token).publish(note or None)
                self._keeper.written(lease.mm_hash)
            case messages.GiveUp(token):
                self._give_up(self._rooms.pop(token))
            case messages.Release(tokens):
                for token in tokens:
                    self._leases.pop(token).release()
            case messages.Annotate(token, note):
                self._leases[token].annotate(note)
            case messages.Clear():
                self._keeper.clear(self)
            case messages.GaveBack():
                self._keeper.gave_back(self)
            case messages.Claim(number, key):
                self._claim(number, key)
            case messages.Landed(key, mm_hash):
                if mm_hash is not None:
                    self._keeper.names.remember(_HASHES, key, mm_hash, HASHES_KEPT)
                self._keeper.claims.end(key, self)
            case messages.Remember(number, space, name, mm_hash, most):
                self._keeper.names.remember(b"\0" + space, name, mm_hash, most)
                self.protocol.send(Nothing(number))
            case messages.Recall(number, space, name):
                found = self._keeper.names.recall(b"\0" + space, name)
                self.protocol.send(Recalled(number, found))

    def _give_up(self, room: ReservedSegment) -> None:
        segment = room.taken_over()
        self._keeper.arena.free(segment)
        self._keeper.written(segment.mm_hash)

    def _grant_if_any(self, number: int, lease: Lease | None) -> None:
        if lease is None:
            self.protocol.send(Nothing(number))
        else:
            self.grant(number, lease)

    def _claim(self, number: int, key: bytes) -> None:
        if not self.alive:
            return
        mm_hash = self._keeper.names.recall(_HASHES, key)
        lease = None if mm_hash is None else self._keeper.arena.lease(mm_hash)
        if lease is not None and lease.note is not None:
            self.grant(number, lease)
            return
        if lease is not None:  # nobody knows how it is put into prompts
            lease.release()
        if self._keeper.claims.take(key, self, partial(self._claim, number, key)):
            self.protocol.send(Nothing(number))


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
