"""Interface of an arena, in this process or another: leases, and reserved segments to write to."""

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
    """State of an arena: present bytes and leases, and counts since the start.

    Attributes:
        bytes_used: in segments, padding included.
        bytes_leased: of these, in segments that can't be evicted now.
        writes, evictions: of items.
    """

    bytes_total: int
    bytes_used: int
    bytes_leased: int
    leases: int
    writes: int
    evictions: int


@dataclass(eq=False, kw_only=True)
class Segment:
    """Location and description of an item in the arena.

    Attributes:
        offset: first byte of the header, from the start of the arena.
        generation: value in the header while the item is there.
        note: attached to the item.
        checksum: kept for later leases.
    """

    mm_hash: MmHash
    offset: int
    layout: SegmentLayout
    generation: int
    note: object = None
    checksum: bytes = b""


class Lease(Released):
    """A lease keeps a segment unchanged and in place until :meth:`release`. Its attributes are the
    segment's. The note goes when the item is evicted."""

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
        """End the lease. Later calls do nothing. Thread-safe."""
        self._arena.end_lease(self)

    @property
    def checksum(self) -> bytes:
        """Checksum given to :meth:`keep_checksum`; it goes when the item is evicted."""
        return self.segment.checksum

    def keep_checksum(self, checksum: bytes) -> None:
        """Keep a checksum of the segment for later leases of this process."""
        self.segment.checksum = checksum

    @property
    def memory(self) -> memoryview:
        """The whole segment, header included. Raises ArenaUnavailableError: closed."""
        memory = self._arena.memory[self.offset : self.offset + self.layout.length]
        if memory.nbytes != self.layout.length:
            raise ArenaUnavailableError("the arena was closed")
        return memory

    def annotate(self, note: object) -> None:
        if self.segment.note is None:
            self._arena.attach_note(self.segment, note)
        self.note = self.segment.note

    def release_soon(self) -> None:
        """Release from a finalizer, without a lock; effective with the next operation."""
        self._arena.end_lease_soon(self)


class ReservedSegment(Released):
    """Room for an item that this or another process writes; :meth:`release` frees it unless
    completed. ``offset`` is the header's, from the start of the arena."""

    def __init__(self, arena: "ArenaAccess", segment: Segment) -> None:
        self._arena = arena
        self._segment: Segment | None = segment
        self.offset = segment.offset
        self.generation = segment.generation
        self.memory = arena.memory[self.offset : self.offset + segment.layout.length]

    def complete(self, envelope: bytes, note: object = None) -> Lease:
        """Publish and lease the item, once all its parts are written."""
        assert self._segment is not None, "completed or given up before"
        segment = self._segment
        # Last, so that no reader finds a valid header before an incomplete segment.
        self.memory[:HEADER_SIZE] = live_header(
            self._arena.offer.key, segment.generation, segment.mm_hash, segment.layout, envelope
        )
        return self.publish(note)

    def publish(self, note: object = None) -> Lease:
        """Publish and lease an item whose writer wrote the header too."""
        assert self._segment is not None, "completed or given up before"
        segment, self._segment = self._segment, None
        return self._arena.publish(segment, note)

    def taken_over(self) -> Segment:
        """Return the segment, which the caller must now publish or free."""
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
    """A budget of shared memory with encoded items by hash. Thread-safe. ``offer`` describes it to
    the processes that map it."""

    offer: ArenaOffer

    @property
    @abstractmethod
    def memory(self) -> memoryview:
        """The whole arena; empty once it is closed."""

    @abstractmethod
    def open(self, *, writable: bool) -> int:
        """Return a descriptor for mapping the arena. Raises ArenaUnavailableError: closed."""

    def put(self, mm_hash: MmHash, encoded: EncodedItem, note: object = None) -> Lease:
        """Write an item unless it is there, and lease it. Raises as :meth:`reserve`. Copies the
        bytes once, without the arena's lock and the GIL. Waits for another writer of the same item.
        ``note`` is kept unless the item has one."""
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
        """Reserve room for an item, or lease it if it is there. Call it in a thread: it may wait
        for another writer. Raises ArenaFullError: leases leave no room. Raises
        ArenaUnavailableError: closed."""

    @abstractmethod
    def lease(self, mm_hash: MmHash) -> Lease | None:
        """Lease a complete item, if there. May ask another process: call it in a thread."""

    @abstractmethod
    def lease_now(self, mm_hash: MmHash) -> Lease | None:
        """Lease an item on an event loop; None also if another process would have to be asked."""

    @abstractmethod
    def drop_notes(self) -> None:
        """Remove the notes of all items."""

    @abstractmethod
    def statistics(self) -> ArenaStatistics:
        """Return this process's share, for the status page and metrics."""

    @abstractmethod
    def close(self) -> None:
        """Close the arena. Workers keep their mappings. Later calls do nothing."""

    # Called by leases and reserved segments, under their own names.

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
