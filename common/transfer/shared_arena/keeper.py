"""Keeper of an arena for other processes: grants leases, and quarantines those of a dead process.

Clients map the whole arena and access it directly; the keeper only grants access. For one event
loop, which it never blocks: waiting clients are answered later.
"""

import asyncio
import logging
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final

from common.aio.ipc import FrameProtocol
from common.aio.supervised import Work, once
from common.errors import ArenaFullError, ArenaUnavailableError
from common.identity import MmHash
from common.transfer.arena import Arena, Lease, ReservedSegment, SegmentLayout
from common.transfer.shared_arena import messages
from common.transfer.shared_arena.media_claims import HASHES_KEPT, MediaNames
from common.transfer.shared_arena.messages import (
    Claimed,
    Forget,
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
"""Quarantine of a dead process's memory, in seconds. Its workers notice the death after
15 s of silence at most, then end its requests and let their engines settle; helpers of its own
that were writing end with it."""

GIVE_BACK_S: Final = 0.25  # time-out for clients to return unused leases

_HASHES = b""  # name space of media hashes, by media key


class Session:
    """Leases and reserved segments of one client process."""

    def __init__(self, keeper: "ArenaKeeper") -> None:
        self._keeper = keeper
        self._tokens = count(1)
        self._leases: dict[int, Lease] = {}
        self._rooms: dict[int, ReservedSegment] = {}
        self.alive = True
        self.protocol: FrameProtocol[ToKeeper] = FrameProtocol(ToKeeper, self._received, self._lost)

    def grant(self, number: int, lease: Lease) -> None:
        """Answer with a lease, which the client owns from now on."""
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
        """Answer with a reserved segment, which the client owns from now on."""
        token = next(self._tokens)
        self._rooms[token] = room
        self.protocol.send(Room(number, token, room.offset, room.generation))

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
                reserve = partial(self._reserve, number, mm_hash, layout)
                self._keeper.spawn(self, reserve)
            case messages.Complete(token, note):
                self._leases[token] = lease = self._rooms.pop(token).publish(note or None)
                self._keeper.change(lease.mm_hash)
            case messages.GiveUp(token):
                segment = self._rooms.pop(token).taken_over()
                self._keeper.arena.free(segment)
                self._keeper.change(segment.mm_hash)
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
                self._keeper.spawn(self, partial(self._claim, number, key))
            case messages.Landed(key, mm_hash):
                if mm_hash is not None:
                    self._keeper.names.remember(_HASHES, key, mm_hash, HASHES_KEPT)
                self._keeper.end_claims(self, [key])
            case messages.Remember(number, space, name, mm_hash, most):
                self._keeper.names.remember(b"\0" + space, name, mm_hash, most)
                self.protocol.send(Nothing(number))
            case messages.Recall(number, space, name):
                found = self._keeper.names.recall(b"\0" + space, name)
                self.protocol.send(Recalled(number, found))

    async def _reserve(self, number: int, mm_hash: MmHash, layout: SegmentLayout) -> None:
        """Answer a reservation, once no other process writes the item."""
        asked_back = False
        while self.alive:
            try:
                found = self._keeper.arena.reserve_now(mm_hash, layout)
            except ArenaFullError as error:
                if asked_back:
                    self.protocol.send(Refused(number, str(error)))
                    return
                asked_back = True
                await self._keeper.make_room()
            except ArenaUnavailableError as error:
                self.protocol.send(Refused(number, str(error)))
                return
            else:
                if found is None:
                    await self._keeper.changed(mm_hash)
                elif isinstance(found, Lease):
                    self.grant(number, found)
                    return
                else:
                    self.give_room(number, mm_hash, found)
                    return

    def _grant_if_any(self, number: int, lease: Lease | None) -> None:
        if lease is None:
            self.protocol.send(Nothing(number))
        else:
            self.grant(number, lease)

    async def _claim(self, number: int, key: bytes) -> None:
        """Grant a medium's item, or let this client make it once no other does."""
        keeper = self._keeper
        while self.alive:
            mm_hash = keeper.names.recall(_HASHES, key)
            lease = None if mm_hash is None else keeper.arena.lease(mm_hash)
            if lease is not None and lease.note is not None:
                self.grant(number, lease)
                return
            if lease is not None:  # no process knows how to place it in prompts
                lease.release()
            if keeper.claims.setdefault(key, self) is self:
                self.protocol.send(Claimed(number, key))
                return
            await keeper.changed(key)


class ArenaKeeper:
    """An arena, and the processes that use it."""

    def __init__(self, arena: Arena, *, quarantine_s: float = QUARANTINE_S) -> None:
        """Take an arena of this process, which the caller closes."""
        self.arena = arena
        self.names = MediaNames()
        self.claims: dict[bytes, Session] = {}  # the client that processes each medium
        self._quarantine_s = quarantine_s
        self._sessions: set[Session] = set()
        self._asked: set[Session] = set()
        self._changed: dict[MmHash | bytes | None, asyncio.Event] = {}
        self._making_room: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self, end: socket.socket) -> None:
        """Let the other end of a socket pair use the arena, until it closes."""
        session = Session(self)
        self._sessions.add(session)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: session.protocol, end)

    def spawn(self, session: Session, work: Work) -> None:
        """Answer a client in a task. If it fails, the connection is closed."""
        answering = once("arena keeper", work, lambda _: session.protocol.close())
        task = asyncio.create_task(answering)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def changed(self, what: MmHash | bytes | None) -> None:
        """Wait until an item is written or given up, a claim ends, or, for None, leases return."""
        await self._changed.setdefault(what, asyncio.Event()).wait()

    def change(self, what: MmHash | bytes | None) -> None:
        if (event := self._changed.pop(what, None)) is not None:
            event.set()

    async def make_room(self) -> None:
        """Have all clients return their unused leases."""
        if self._making_room is None or self._making_room.done():
            self._making_room = asyncio.create_task(self._ask_back())
        await self._making_room

    async def _ask_back(self) -> None:
        self._asked = set(self._sessions)
        for session in self._asked:
            session.protocol.send(GiveBack())
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S):
                while self._asked:
                    await self.changed(None)

    def gave_back(self, session: Session) -> None:
        """Note that a client has returned its unused leases, or is gone."""
        self._asked.discard(session)
        self.change(None)

    def end_claims(self, session: Session, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self.claims.get(key) is session:
                del self.claims[key]
                self.change(key)

    def clear(self, by: Session) -> None:
        """Drop all notes and names, in all processes."""
        self.arena.drop_notes()
        self.names.clear()
        for session in self._sessions - {by}:
            session.forget()

    def lost(self, session: Session, leases: list[Lease], rooms: list[ReservedSegment]) -> None:
        """Quarantine the memory of a lost client: its workers may still read it, and its helpers
        write. The items may be leased by other clients, or written elsewhere."""
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
            self.change(segment.mm_hash)
        self.end_claims(session, [*self.claims])
        self.gave_back(session)
