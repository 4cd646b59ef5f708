"""The frontend's store of processed tensors, in shared memory that workers read in place.

An item is written once, under its hash, and leased to any number of readers.
:mod:`common.transfer.arena.segment_table` allocates; this module writes.
"""

import mmap
import os
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from common.errors import ArenaFullError, ArenaUnavailableError
from common.identity import MmHash
from common.transfer import pages
from common.transfer.arena.access import (
    ArenaAccess,
    ArenaStatistics,
    Lease,
    ReservedSegment,
    Segment,
)
from common.transfer.arena.file import SHARED_MEMORY, create, new_name, open_to_map
from common.transfer.arena.layout import (
    HEADER_SIZE,
    NONCE_SIZE,
    SEGMENT_ALIGNMENT,
    SEGMENTS_START,
    ArenaOffer,
    SegmentLayout,
    aligned,
    pack_head,
    reclaimed_header,
)
from common.transfer.arena.segment_table import Block, SegmentTable


@dataclass(eq=False, kw_only=True)
class _Placed(Segment):
    block: Block
    complete: bool = False


class Arena(ArenaAccess):
    """An arena of this process. Thread-safe; only :meth:`put` and :meth:`__init__` take long."""

    def __init__(
        self,
        size: int,
        *,
        directory: Path = SHARED_MEMORY,
        prefault: bool = True,
    ) -> None:
        """Create the file, allocate its memory and map its pages: 0.3 to 2 s per GB, without the
        GIL. ``size`` is rounded up to whole pages; one page is the arena's own. Raises
        ArenaUnavailableError: shared memory is too small."""
        size = max(aligned(size, SEGMENT_ALIGNMENT), SEGMENTS_START + SEGMENT_ALIGNMENT)
        self.offer = ArenaOffer(
            name=new_name(),
            size=size,
            generation=secrets.randbits(64),
            nonce=secrets.token_hex(NONCE_SIZE),
        )
        self._key = self.offer.key
        self._path = directory / self.offer.name
        # Kept open for its lock, which tells reapers in other PID namespaces that this arena is in
        # use.
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
        self._segments: dict[MmHash, _Placed] = {}
        self._by_offset: dict[int, _Placed] = {}
        self._next_generation = 1
        self._to_release: deque[Lease] = deque()
        self._leases = 0
        self._writes = 0
        self._evictions = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    @property
    def memory(self) -> memoryview:
        return self._memory

    def open(self, *, writable: bool) -> int:
        return open_to_map(self._path, writable=writable)

    def reserve(self, mm_hash: MmHash, layout: SegmentLayout) -> ReservedSegment | Lease:
        with self._changed:
            while (found := self._reserve_now(mm_hash, layout)) is None:
                self._changed.wait()
            return found

    def reserve_now(self, mm_hash: MmHash, layout: SegmentLayout) -> ReservedSegment | Lease | None:
        """Reserve without waiting: None if the item is being written at this moment."""
        with self._changed:
            return self._reserve_now(mm_hash, layout)

    def lease(self, mm_hash: MmHash) -> Lease | None:
        with self._changed:
            self._release_marked()
            segment = self._segments.get(mm_hash)
            if self._closed or segment is None or not segment.complete:
                return None
            return self._lease(segment)

    lease_now = lease

    def contains(self, mm_hash: MmHash) -> bool:
        """Return whether :meth:`lease` would succeed now."""
        with self._changed:
            segment = self._segments.get(mm_hash)
            return not self._closed and segment is not None and segment.complete

    def drop_notes(self) -> None:
        with self._changed:
            for segment in self._segments.values():
                segment.note = None

    def forget(self) -> None:
        """Have all items written anew. Leases of present ones go on."""
        with self._changed:
            self._segments = {
                mm_hash: segment
                for mm_hash, segment in self._segments.items()
                if not segment.complete
            }

    def statistics(self) -> ArenaStatistics:
        with self._changed:
            self._release_marked()
            return ArenaStatistics(
                bytes_total=self._table.capacity,
                bytes_used=self._table.capacity - self._table.free_bytes,
                bytes_leased=self._table.leased_bytes,
                leases=self._leases,
                writes=self._writes,
                evictions=self._evictions,
            )

    def close(self) -> None:
        """Remove the file. Workers keep their mappings; the memory goes with its last view. A
        :meth:`put` in another thread may still complete. Later calls do nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._memory = memoryview(b"")
            self._changed.notify_all()
        self._unlink()

    def _unlink(self) -> None:
        # The file first: a reaper that gets the lock afterwards finds nothing to remove.
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def publish(self, segment: Segment, note: object) -> Lease:
        assert isinstance(segment, _Placed), segment
        with self._changed:
            segment.complete = True
            segment.note = note
            self._writes += 1
            self._leases += 1
            self._changed.notify_all()
            return Lease(self, segment)

    def free(self, segment: Segment) -> None:
        self.withdraw(segment)
        self.free_withdrawn(segment)

    def withdraw(self, segment: Segment) -> None:
        """Allow rewriting the item of a lost writer elsewhere. The room stays allocated until
        :meth:`free_withdrawn`, since the writer's helpers may still write to it."""
        assert isinstance(segment, _Placed), segment
        with self._changed:
            self._forget(segment)
            self._changed.notify_all()

    def free_withdrawn(self, segment: Segment) -> None:
        """Free the room, once nothing writes to it."""
        assert isinstance(segment, _Placed), segment
        with self._changed:
            self._table.discard(segment.block)

    def attach_note(self, segment: Segment, note: object) -> None:
        segment.note = note

    def end_lease(self, lease: Lease) -> None:
        with self._changed:
            self._release_now(lease)

    def end_lease_soon(self, lease: Lease) -> None:
        self._to_release.append(lease)

    def _reserve_now(
        self, mm_hash: MmHash, layout: SegmentLayout
    ) -> ReservedSegment | Lease | None:
        self._release_marked()
        if self._closed:
            raise ArenaUnavailableError("the arena was closed")
        segment = self._segments.get(mm_hash)
        if segment is None:
            return ReservedSegment(self, self._reserve(mm_hash, layout))
        return self._lease(segment) if segment.complete else None

    def _lease(self, segment: _Placed) -> Lease:
        self._table.lease(segment.block)
        self._leases += 1
        return Lease(self, segment)

    def _reserve(self, mm_hash: MmHash, layout: SegmentLayout) -> _Placed:
        placement = self._table.place(layout.length)
        if placement is None:
            raise ArenaFullError(
                f"no room for {layout.length} bytes in an arena of {self._table.capacity}: "
                f"{self._table.leased_bytes} bytes are leased"
            )
        for offset in placement.evicted:
            evicted = self._by_offset[offset]
            self._forget(evicted)
            self._evictions += 1
            # A present or late reader must notice before the space is overwritten.
            start = SEGMENTS_START + offset
            self._memory[start : start + HEADER_SIZE] = reclaimed_header(
                self._key, self._generation()
            )
        segment = _Placed(
            mm_hash=mm_hash,
            offset=SEGMENTS_START + placement.block.offset,
            layout=layout,
            generation=self._generation(),
            block=placement.block,
        )
        self._segments[mm_hash] = segment
        self._by_offset[placement.block.offset] = segment
        return segment

    def _forget(self, segment: _Placed) -> None:
        if self._segments.get(segment.mm_hash) is segment:  # not if forgotten, or written anew
            del self._segments[segment.mm_hash]
        del self._by_offset[segment.block.offset]

    def _generation(self) -> int:
        generation = self._next_generation
        self._next_generation += 1
        return generation

    def _release_marked(self) -> None:
        while self._to_release:
            self._release_now(self._to_release.popleft())

    def _release_now(self, lease: Lease) -> None:
        if not lease.released:
            lease.released = True
            self._leases -= 1
            segment = lease.segment
            assert isinstance(segment, _Placed), segment
            self._table.release(segment.block)
