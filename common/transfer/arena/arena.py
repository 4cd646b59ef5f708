"""The frontend's store of processed tensors, in shared memory that workers read in place.

An item is written once, under its hash, and leased to any number of readers. Which bytes
are whose is decided in :mod:`common.transfer.arena.segment_table`; here they are written.
"""

import mmap
import os
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from common.errors import ArenaFullError, ArenaUnavailableError
from common.identity import MmHash
from common.released import Released
from common.transfer import pages
from common.transfer.arena.file import SHARED_MEMORY, create, new_name
from common.transfer.arena.layout import NONCE_SIZE, SEGMENTS_START, ArenaOffer, pack_head
from common.transfer.arena.segment import (
    HEADER_SIZE,
    EncodedItem,
    SegmentLayout,
    aligned,
    live_header,
    reclaimed_header,
    write_parts,
)
from common.transfer.arena.segment_table import SEGMENT_ALIGNMENT, Block, SegmentTable


@dataclass(frozen=True)
class ArenaStatistics:
    """State of an arena.

    Attributes:
        bytes_total: bytes for segments.
        bytes_used: of these, in segments, padding included.
        bytes_leased: of these, in segments that can't be evicted now.
        segments: how many items it holds.
        leases: how many are leased at this moment, counting every lease.
        writes: items written since the start.
        hits: leases given on items that were already there.
        evictions: items evicted since the start.
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


@dataclass(eq=False)
class _Segment:
    mm_hash: MmHash
    block: Block
    layout: SegmentLayout
    generation: int
    complete: bool = False
    note: object = None
    checksum: bytes = b""


class Lease(Released):
    """A promise that a segment stays where and what it is until :meth:`release`.

    Attributes:
        mm_hash: the item.
        offset: first byte of the segment's header, from the start of the arena.
        generation: what the header says as long as the lease lasts.
        layout: where the parts lie.
        note: what the writer attached to the item; it goes when the item is evicted.
    """

    def __init__(self, arena: "Arena", segment: _Segment) -> None:
        self._arena = arena
        self._segment = segment
        self._released = False
        self.mm_hash = segment.mm_hash
        self.offset = SEGMENTS_START + segment.block.offset
        self.generation = segment.generation
        self.layout = segment.layout
        self.note = segment.note

    def release(self) -> None:
        """End the lease. The second and later calls do nothing; safe from any thread."""
        self._arena._release(self)

    @property
    def checksum(self) -> bytes:
        """What :meth:`keep_checksum` was given; it goes when the item is evicted."""
        return self._segment.checksum

    def keep_checksum(self, checksum: bytes) -> None:
        """Keep a checksum of the segment for later leases."""
        self._segment.checksum = checksum

    @property
    def memory(self) -> memoryview:
        """All of the segment, header included.

        Raises:
            ArenaUnavailableError: the arena was closed.
        """
        memory = self._arena.memory[self.offset : self.offset + self.layout.length]
        if memory.nbytes != self.layout.length:
            raise ArenaUnavailableError("the arena was closed")
        return memory

    def annotate(self, note: object) -> None:
        """Attach a note to an item that has none."""
        if self._segment.note is None:
            self._segment.note = note
        self.note = self._segment.note

    def release_soon(self) -> None:
        """The same for a finalizer, which may run in the middle of anything: takes no lock.
        It counts from the arena's next operation on.
        """
        self._arena._to_release.append(self)


class ReservedSegment:
    """Room for an item that somebody is about to write, this process or another.

    As a context manager it is given up on the way out, unless it was completed.

    Attributes:
        offset: of the segment's header, from the start of the arena.
        memory: the segment.
    """

    def __init__(self, arena: "Arena", segment: _Segment) -> None:
        self._arena = arena
        self._segment: _Segment | None = segment
        self.offset = SEGMENTS_START + segment.block.offset
        self.memory = arena.memory[self.offset : self.offset + segment.layout.length]

    def complete(self, envelope: bytes, note: object = None) -> Lease:
        """All parts are written: publish the item, and lease it.

        Args:
            envelope: the first of the parts.
            note: kept with the item, see :attr:`Lease.note`.
        """
        assert self._segment is not None, "completed or given up before"
        segment, self._segment = self._segment, None
        return self._arena._complete(segment, self.memory, envelope, note)

    def give_up(self) -> None:
        """Free the room. Does nothing once it was completed."""
        segment, self._segment = self._segment, None
        self.memory = memoryview(b"")
        if segment is not None:
            self._arena._give_up(segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give_up()


class Arena:
    """A budget of shared memory that holds encoded items by hash.

    All methods may be called from any thread; only :meth:`put` and :meth:`__init__` take
    long.
    """

    def __init__(
        self,
        size: int,
        *,
        directory: Path = SHARED_MEMORY,
        prefault: bool = True,
    ) -> None:
        """Create the file, allocate all its memory and map its pages.

        Takes from 0.3 to 2 s per GB, without the interpreter's lock: call it in a thread if
        something else should go on.

        Args:
            size: bytes, rounded up to whole pages; one page is the arena's own.
            directory: where shared memory is mounted.
            prefault: whether to map all pages now.

        Raises:
            ArenaUnavailableError: there is not that much shared memory.
        """
        size = max(aligned(size, SEGMENT_ALIGNMENT), SEGMENTS_START + SEGMENT_ALIGNMENT)
        self.offer = ArenaOffer(
            name=new_name(),
            size=size,
            generation=secrets.randbits(64),
            nonce=secrets.token_hex(NONCE_SIZE),
        )
        self._key = self.offer.key
        self._path = directory / self.offer.name
        # Kept open because it holds the lock that tells reapers in other PID namespaces
        # that this arena is in use.
        self._descriptor = create(self._path, size)
        try:
            self._memory = memoryview(mmap.mmap(self._descriptor, size))
        except OSError as error:
            self._unlink()
            raise ArenaUnavailableError(f"can't map an arena of {size} bytes: {error}") from error
        if prefault:
            pages.populate(self._memory, for_writing=True)
        head = pack_head(self.offer)
        self._memory[: len(head)] = head

        self._table = SegmentTable(size - SEGMENTS_START)
        self._segments: dict[MmHash, _Segment] = {}
        self._by_offset: dict[int, _Segment] = {}
        self._next_generation = 1
        self._to_release: deque[Lease] = deque()
        self._leases = 0
        self._writes = 0
        self._hits = 0
        self._evictions = 0
        self._full = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    @property
    def memory(self) -> memoryview:
        """All of the arena, for a transport that reads it by other means than mapping."""
        return self._memory

    def open(self, *, writable: bool) -> int:
        """A descriptor through which the arena can be mapped, for reading only or not.

        Raises:
            ArenaUnavailableError: the arena was closed.
        """
        mode = os.O_RDWR if writable else os.O_RDONLY
        try:
            return os.open(self._path, mode | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaUnavailableError(f"can't open the arena: {error}") from error

    def put(self, mm_hash: MmHash, encoded: EncodedItem, note: object = None) -> Lease:
        """Write an item, or find it already there, and lease it.

        One copy of the bytes, during which neither the arena's nor the interpreter's lock
        is held. If another thread is writing the same item, waits for it.

        Args:
            note: kept with the item unless it has one, see :attr:`Lease.note`.

        Raises:
            ArenaFullError: leased segments leave no room.
            ArenaUnavailableError: the arena was closed.
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

    def reserve(self, mm_hash: MmHash, layout: SegmentLayout) -> ReservedSegment | Lease:
        """Room to write an item to, or the item if it is already there.

        If somebody else is writing the same item, waits for it: call it in a thread.

        Raises:
            ArenaFullError: leased segments leave no room.
            ArenaUnavailableError: the arena was closed.
        """
        with self._changed:
            self._release_marked()
            lease = self._lease_when_written(mm_hash)
            return lease or ReservedSegment(self, self._reserve(mm_hash, layout))

    def lease(self, mm_hash: MmHash) -> Lease | None:
        """Lease an item that is there; None if it isn't, or not completely yet."""
        with self._changed:
            self._release_marked()
            segment = self._segments.get(mm_hash)
            if self._closed or segment is None or not segment.complete:
                return None
            return self._lease(segment)

    def contains(self, mm_hash: MmHash) -> bool:
        """Whether :meth:`lease` would give one now."""
        with self._changed:
            segment = self._segments.get(mm_hash)
            return not self._closed and segment is not None and segment.complete

    def drop_notes(self) -> None:
        """Forget what is attached to items."""
        with self._changed:
            for segment in self._segments.values():
                segment.note = None

    def statistics(self) -> ArenaStatistics:
        """Figures for the status page and metrics."""
        with self._changed:
            self._release_marked()
            return ArenaStatistics(
                bytes_total=self._table.capacity,
                bytes_used=self._table.capacity - self._table.free_bytes,
                bytes_leased=self._table.leased_bytes,
                segments=len(self._segments),
                leases=self._leases,
                writes=self._writes,
                hits=self._hits,
                evictions=self._evictions,
                full=self._full,
            )

    def close(self) -> None:
        """Remove the file. Workers that have it mapped keep their memory.

        The memory goes once the last view of it is gone; a :meth:`put` under way in another
        thread may still end. The second and later calls do nothing.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._memory = memoryview(b"")
            self._changed.notify_all()
        self._unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _unlink(self) -> None:
        # The file first: whoever gets the lock afterwards finds nothing to remove.
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _complete(
        self, segment: _Segment, memory: memoryview, envelope: bytes, note: object
    ) -> Lease:
        header = live_header(
            self._key, segment.generation, segment.mm_hash, segment.layout, envelope
        )
        # Last, so that nobody finds a valid header before an incomplete segment.
        memory[:HEADER_SIZE] = header
        with self._changed:
            segment.complete = True
            segment.note = note
            self._writes += 1
            self._leases += 1
            self._changed.notify_all()
            return Lease(self, segment)

    def _give_up(self, segment: _Segment) -> None:
        with self._changed:
            self._forget(segment)
            self._table.discard(segment.block)
            self._changed.notify_all()

    def _lease_when_written(self, mm_hash: MmHash) -> Lease | None:
        """A lease once whoever writes the item has done so; None if the caller should."""
        while True:
            if self._closed:
                raise ArenaUnavailableError("the arena was closed")
            segment = self._segments.get(mm_hash)
            if segment is None:
                return None
            if segment.complete:
                return self._lease(segment)
            self._changed.wait()

    def _lease(self, segment: _Segment) -> Lease:
        self._table.lease(segment.block)
        self._leases += 1
        self._hits += 1
        return Lease(self, segment)

    def _reserve(self, mm_hash: MmHash, layout: SegmentLayout) -> _Segment:
        placement = self._table.place(layout.length)
        if placement is None:
            self._full += 1
            raise ArenaFullError(
                f"no room for {layout.length} bytes in an arena of {self._table.capacity}: "
                f"{self._table.leased_bytes} bytes are leased"
            )
        for offset in placement.evicted:
            evicted = self._by_offset[offset]
            self._forget(evicted)
            self._evictions += 1
            # A reader that comes late, or is at it, must find out before the space is
            # written to again.
            start = SEGMENTS_START + offset
            self._memory[start : start + HEADER_SIZE] = reclaimed_header(
                self._key, self._generation()
            )
        segment = _Segment(mm_hash, placement.block, layout, self._generation())
        self._segments[mm_hash] = segment
        self._by_offset[placement.block.offset] = segment
        return segment

    def _forget(self, segment: _Segment) -> None:
        del self._segments[segment.mm_hash]
        del self._by_offset[segment.block.offset]

    def _generation(self) -> int:
        generation = self._next_generation
        self._next_generation += 1
        return generation

    def _release(self, lease: Lease) -> None:
        with self._changed:
            self._release_now(lease)

    def _release_marked(self) -> None:
        while self._to_release:
            self._release_now(self._to_release.popleft())

    def _release_now(self, lease: Lease) -> None:
        if not lease._released:
            lease._released = True
            self._leases -= 1
            self._table.release(lease._segment.block)
