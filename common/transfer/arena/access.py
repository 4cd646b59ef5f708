"""What an arena is to those who use it, wherever it is kept: in this process, or in another.

Also what they get from it: leases, and room to write to.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from common.aio.cleanup import Released
from common.errors import ArenaUnavailableError
from common.identity import MmHash
from common.transfer.arena.layout import (
    HEADER_SIZE,
    ArenaOffer,
    EncodedItem,
    SegmentLayout,
    live_header,
    write_parts,
)


@dataclass(frozen=True)
class ArenaStatistics:
    """State of an arena: bytes and leases now, the others since the start.

    Attributes:
        bytes_used: in segments, padding included.
        bytes_leased: of these, in segments that can't be evicted now.
        segments: items that it holds.
        hits: leases given on items that were already there.
        full: how often an item found no room.
    """

    bytes_total: int
    bytes_used: int
    bytes_leased: int
    segments: int
    leases: int
    writes: int
    hits: int
    evictions: int
    full: int


@dataclass(eq=False, kw_only=True)
class Segment:
    """Where and what an item in the arena is.

    Attributes:
        offset: first byte of the header, from the start of the arena.
        generation: what the header says for as long as the item is there.
        layout: where the parts lie.
        note: what was attached to the item.
        checksum: that somebody keeps for later leases.
    """

    mm_hash: MmHash
    offset: int
    layout: SegmentLayout
    generation: int
    note: object = None
    checksum: bytes = b""


class Lease(Released):
    """A promise that a segment stays where and what it is until :meth:`release`.

    Its attributes are the segment's. The note goes when the item is evicted.
    """

    def __init__(self, arena: "ArenaAccess", segment: Segment) -> None:
        self._arena = arena
        self.segment = segment
        self.released = False
        self.mm_hash = segment.mm_hash
        self.offset = segment.offset
        self.generation = segment.generation
        self.layout = segment.layout
        self.note = segment.note

    def release(self) -> None:
        """End the lease. The second and later calls do nothing; safe from any thread."""
        self._arena.end_lease(self)

    @property
    def checksum(self) -> bytes:
        """What :meth:`keep_checksum` was given; it goes when the item is evicted."""
        return self.segment.checksum

    def keep_checksum(self, checksum: bytes) -> None:
        """Keep a checksum of the segment for later leases of this process."""
        self.segment.checksum = checksum

    @property
    def memory(self) -> memoryview:
        """All of the segment, header included.

        Raises ArenaUnavailableError: the arena was closed.
        """
        memory = self._arena.memory[self.offset : self.offset + self.layout.length]
        if memory.nbytes != self.layout.length:
            raise ArenaUnavailableError("the arena was closed")
        return memory

    def annotate(self, note: object) -> None:
        if self.segment.note is None:
            self._arena.attach_note(self.segment, note)
        self.note = self.segment.note

    def release_soon(self) -> None:
        """The same for a finalizer, which may run in the middle of anything: takes no lock.
        It counts from the arena's next operation on."""
        self._arena.end_lease_soon(self)


class ReservedSegment(Released):
    """Room for an item that somebody is about to write, this process or another.

    :meth:`release` gives it up, unless it was completed.

    Attributes:
        offset: of the segment's header, from the start of the arena.
        memory: the segment.
    """

    def __init__(self, arena: "ArenaAccess", segment: Segment) -> None:
        self._arena = arena
        self._segment: Segment | None = segment
        self.offset = segment.offset
        self.generation = segment.generation
        self.memory = arena.memory[self.offset : self.offset + segment.layout.length]

    def complete(self, envelope: bytes, note: object = None) -> Lease:
        """All parts are written, the envelope first: publish the item, and lease it."""
        assert self._segment is not None, "completed or given up before"
        segment = self._segment
        # Last, so that nobody finds a valid header before an incomplete segment.
        self.memory[:HEADER_SIZE] = live_header(
            self._arena.offer.key, segment.generation, segment.mm_hash, segment.layout, envelope
        )
        return self.publish(note)

    def publish(self, note: object = None) -> Lease:
        """The same where whoever wrote the parts wrote the header too."""
        assert self._segment is not None, "completed or given up before"
        segment, self._segment = self._segment, None
        return self._arena.publish(segment, note)

    def taken_over(self) -> Segment:
        """The segment, which is now somebody else's to publish or to free."""
        assert self._segment is not None, "completed or given up before"
        segment, self._segment = self._segment, None
        self.memory = memoryview(b"")
        return segment

    def release(self) -> None:
        segment, self._segment = self._segment, None
        self.memory = memoryview(b"")
        if segment is not None:
            self._arena.free(segment)


class ArenaAccess(ABC):
    """A budget of shared memory that holds encoded items by hash. For any thread.

    Attributes:
        offer: by which others map it.
    """

    offer: ArenaOffer

    @property
    @abstractmethod
    def memory(self) -> memoryview:
        """All of the arena; empty once it is closed."""

    @abstractmethod
    def open(self, *, writable: bool) -> int:
        """A descriptor through which the arena can be mapped, for reading only or not.

        Raises ArenaUnavailableError: the arena was closed.
        """

    def put(self, mm_hash: MmHash, encoded: EncodedItem, note: object = None) -> Lease:
        """Write an item, or find it already there, and lease it. Raises as :meth:`reserve`.

        One copy of the bytes, during which neither the arena's nor the interpreter's lock
        is held. If somebody else is writing the same item, waits for it.

        Args:
            note: kept with the item unless it has one.
        """
        layout = SegmentLayout(
            len(encoded.envelope), tuple(buffer.nbytes for buffer in encoded.buffers)
        )
        found = self.reserve(mm_hash, layout)
        if isinstance(found, Lease):
            found.annotate(note)
            return found
        with found as room:
            write_parts(room.memory, layout, [encoded.envelope, *encoded.buffers])
            return room.complete(encoded.envelope, note)

    @abstractmethod
    def reserve(self, mm_hash: MmHash, layout: SegmentLayout) -> ReservedSegment | Lease:
        """Room to write an item to, or the item if it is already there.

        If somebody else is writing the same item, waits for it: call it in a thread.

        Raises:
            ArenaFullError: leased segments leave no room.
            ArenaUnavailableError: the arena was closed.
        """

    @abstractmethod
    def lease(self, mm_hash: MmHash) -> Lease | None:
        """Lease an item that is there; None if it isn't, or not completely yet.

        May have to ask another process: call it in a thread.
        """

    @abstractmethod
    def lease_now(self, mm_hash: MmHash) -> Lease | None:
        """The same for an event loop: None also if somebody else would have to be asked."""

    @abstractmethod
    def drop_notes(self) -> None:
        """Forget what is attached to items."""

    @abstractmethod
    def statistics(self) -> ArenaStatistics:
        """Figures for the status page and metrics, of what this process has of the arena."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it. Workers that have it mapped keep their memory. The second and later calls
        do nothing."""

    # For leases and reserved segments, which have names for these.

    @abstractmethod
    def end_lease(self, lease: Lease) -> None:
        """See :meth:`Lease.release`."""

    @abstractmethod
    def end_lease_soon(self, lease: Lease) -> None:
        """See :meth:`Lease.release_soon`."""

    @abstractmethod
    def attach_note(self, segment: Segment, note: object) -> None:
        """See :meth:`Lease.annotate`."""

    @abstractmethod
    def publish(self, segment: Segment, note: object) -> Lease:
        """See :meth:`ReservedSegment.publish`."""

    @abstractmethod
    def free(self, segment: Segment) -> None:
        """See :meth:`ReservedSegment.release`."""
