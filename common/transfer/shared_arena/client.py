"""Client of an arena that another process of this frontend keeps.

Leases are shared within this process and, up to a limit, kept when unused: a repeated picture then
needs no call to the keeper. They are returned when another process needs room.
"""

import socket
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final

import cloudpickle

from common.errors import ArenaFullError, ArenaUnavailableError
from common.identity import MmHash
from common.lru import Lru
from common.transfer.arena import (
    SHARED_MEMORY,
    ArenaAccess,
    ArenaMapping,
    ArenaOffer,
    ArenaStatistics,
    Lease,
    ReservedSegment,
    Segment,
    SegmentLayout,
    open_to_map,
)
from common.transfer.shared_arena.connection import KeeperConnection
from common.transfer.shared_arena.messages import (
    Annotate,
    Answer,
    Claimed,
    Clear,
    Complete,
    Forget,
    GaveBack,
    GiveBack,
    GiveUp,
    Granted,
    Landed,
    LeaseItem,
    Refused,
    Release,
    Reserve,
    Room,
)

KEPT_SHARE: Final = 0.25  # of the arena: unused leases of all its processes together


@dataclass(eq=False, kw_only=True)
class _Held(Segment):
    """A segment that the keeper leases to this process under a token, with ``uses`` leases here."""

    token: int
    uses: int = 0


class SharedArena(ArenaAccess):
    """Another process's arena, mapped here."""

    def __init__(self, offer: ArenaOffer, end: socket.socket, *, processes: int = 1) -> None:
        """Map the arena. The keeper has attached the other end of the pair; ``processes`` share the
        arena. Raises ArenaUnavailableError: the arena is gone."""
        self.offer = offer
        self._path = SHARED_MEMORY / offer.name
        self._memory = ArenaMapping.open(offer, writable=True).memory
        self._lock = threading.Lock()
        self._held: dict[MmHash, _Held] = {}
        self._most_idle = int(offer.size * KEPT_SHARE / processes)
        # Never over its budget: _keep_few evicts, since evicted leases have to be released.
        self._idle: Lru[MmHash, _Held] = Lru(offer.size, lambda held: held.layout.length)
        self._to_release: deque[Lease] = deque()
        self._leases = self._writes = 0
        self.connection = KeeperConnection(end, self._ordered, self._unwanted)

    @property
    def memory(self) -> memoryview:
        return self._memory

    def open(self, *, writable: bool) -> int:
        return open_to_map(self._path, writable=writable)

    def lease_now(self, mm_hash: MmHash) -> Lease | None:
        with self._lock:
            self._release_marked()
            held = self._held.get(mm_hash)
            if held is None or self.connection.lost:
                return None
            return self._lease(held)

    def lease(self, mm_hash: MmHash) -> Lease | None:
        found = self.lease_now(mm_hash)
        if found is not None:
            return found
        try:
            answer = self.connection.ask(partial(LeaseItem, mm_hash=mm_hash)).result()
        except ArenaUnavailableError:
            return None
        return self.granted(answer) if isinstance(answer, Granted) else None

    def reserve(self, mm_hash: MmHash, layout: SegmentLayout) -> ReservedSegment | Lease:
        found = self.lease_now(mm_hash)
        if found is not None:
            return found
        answer = self.connection.ask(
            partial(
                Reserve,
                mm_hash=mm_hash,
                envelope_size=layout.envelope_size,
                buffer_sizes=layout.buffer_sizes,
            )
        ).result()
        match answer:
            case Granted():
                return self.granted(answer)
            case Room(_, token, offset, generation):
                held = _Held(
                    mm_hash=mm_hash,
                    offset=offset,
                    layout=layout,
                    generation=generation,
                    token=token,
                )
                return ReservedSegment(self, held)
            case Refused(_, reason):
                raise ArenaFullError(reason)
        raise ArenaUnavailableError(f"the keeper of the arena answered {answer!r}")

    def granted(self, answer: Granted) -> Lease:
        """Register a lease from the keeper."""
        # From another process of ours, on a private socket pair.
        note = cloudpickle.loads(answer.note) if answer.note else None
        with self._lock:
            held = self._held.get(answer.mm_hash)
            if held is not None:  # another thread here was faster
                self.connection.tell(Release([answer.token]))
            else:
                held = self._held[answer.mm_hash] = _Held(
                    mm_hash=answer.mm_hash,
                    offset=answer.offset,
                    layout=SegmentLayout(answer.envelope_size, answer.buffer_sizes),
                    generation=answer.generation,
                    token=answer.token,
                )
            if held.note is None:
                held.note = note
            return self._lease(held)

    def drop_notes(self) -> None:
        self._forget()
        self.connection.tell(Clear())

    def statistics(self) -> ArenaStatistics:
        with self._lock:
            self._release_marked()
            held = sum(each.layout.length for each in self._held.values())
            return ArenaStatistics(
                bytes_total=self.offer.size,
                bytes_used=held,
                bytes_leased=held - self._idle.weight,
                leases=self._leases,
                writes=self._writes,
                evictions=0,
            )

    def close(self) -> None:
        self._memory = memoryview(b"")
        self.connection.close()

    def publish(self, segment: Segment, note: object) -> Lease:
        assert isinstance(segment, _Held), segment
        segment.note = note
        packed = b"" if note is None else cloudpickle.dumps(note)
        with self._lock:
            self._writes += 1
            self._held[segment.mm_hash] = segment
            self.connection.tell(Complete(segment.token, packed))
            return self._lease(segment)

    def free(self, segment: Segment) -> None:
        assert isinstance(segment, _Held), segment
        self.connection.tell(GiveUp(segment.token))

    def attach_note(self, segment: Segment, note: object) -> None:
        assert isinstance(segment, _Held), segment
        segment.note = note
        self.connection.tell(Annotate(segment.token, cloudpickle.dumps(note)))

    def end_lease(self, lease: Lease) -> None:
        with self._lock:
            self._release(lease)
            self._keep_few()

    def end_lease_soon(self, lease: Lease) -> None:
        self._to_release.append(lease)

    def _lease(self, held: _Held) -> Lease:
        self._idle.pop(held.mm_hash)
        held.uses += 1
        self._leases += 1
        return Lease(self, held)

    def _release(self, lease: Lease) -> None:
        if lease.released:
            return
        lease.released = True
        self._leases -= 1
        held = lease.segment
        assert isinstance(held, _Held), held
        held.uses -= 1
        if not held.uses:
            self._idle.put(held.mm_hash, held)

    def _release_marked(self) -> None:
        while self._to_release:
            self._release(self._to_release.popleft())
        self._keep_few()

    def _keep_few(self, most: int | None = None) -> None:
        """Return kept leases beyond a limit, the oldest first."""
        evicted = self._idle.shrink(self._most_idle if most is None else most)
        for held in evicted:
            del self._held[held.mm_hash]
        if evicted:
            self.connection.tell(Release([held.token for held in evicted]))

    def _forget(self) -> None:
        with self._lock:
            for held in self._held.values():
                held.note = None

    def _ordered(self, order: GiveBack | Forget) -> None:
        if isinstance(order, Forget):
            self._forget()
            return
        with self._lock:
            self._release_marked()
            self._keep_few(0)
            self.connection.tell(GaveBack())

    def _unwanted(self, answer: Answer) -> None:
        match answer:
            case Granted(_, token):
                self.connection.tell(Release([token]))
            case Room(_, token):
                self.connection.tell(GiveUp(token))
            case Claimed(_, key):
                self.connection.tell(Landed(key, None))
