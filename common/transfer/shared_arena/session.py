"""One process that uses a kept arena, as the keeper sees it: what it has, what it asks."""

from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from common.frames import FrameProtocol
from common.transfer.arena import Lease, ReservedSegment, SegmentLayout
from common.transfer.shared_arena import messages
from common.transfer.shared_arena.messages import (
    Forget,
    Granted,
    Nothing,
    Recalled,
    Refused,
    Room,
    ToKeeper,
)
from common.transfer.shared_arena.names import HASHES_KEPT

if TYPE_CHECKING:
    from common.transfer.shared_arena.keeper import ArenaKeeper

_HASHES = b""
"""Space of the hashes that media had, by what makes them alike."""


class Session:
    """What one process has of the arena.

    Attributes:
        alive: whether it is there.
        protocol: the keeper's end of the connection.
    """

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
        """Answer that there is no room."""
        self.protocol.send(Refused(number, reason))

    def forget(self) -> None:
        """Somebody else has cleared what was kept."""
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
