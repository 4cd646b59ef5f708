"""Read items over NIXL in pieces, check them on arrival, and build them."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from common.aio.cleanup import undo_on_error
from common.errors import ArenaFullError, ArenaUnavailableError, CorruptSegmentError
from common.transfer.arena import HEAD_SIZE, HEADER_SIZE, check_head, check_header, copy_bytes
from common.transfer.base import Received
from common.transfer.checksum import PIECE, Checksum, piece_starts
from common.transfer.codec import decode
from common.transfer.handshake import NixlOffer
from common.transfer.metadata import NixlMetadata
from common.transfer.nixl.landing import LandingArea, Room, Rooms, touched_memory
from common.transfer.nixl.link import ReaderLink, Source
from common.transfer.nixl_processes import NixlNetwork

_PIECES_PER_ITEM: Final = 8
"""Reads of one item that go on at the same time: over TCP the bytes of a second one follow at once
where the first would be waited for from end to end."""

MAX_OWN_BYTES: Final = 4 << 30
"""Of all items together that find no room. A frontend says how long an item is, and its memory is
touched before any of its bytes has come."""


class _OwnMemory:
    """Memory of items that find no room, allocated and freed in one thread: concurrent page faults
    stall the event loop, and unmapping takes long."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl-memory")
        self._bytes = 0  # that thread's

    async def room(self, size: int) -> Room:
        """Allocate memory. Raises ArenaFullError: there is not enough."""
        loop = asyncio.get_running_loop()
        memory = [await loop.run_in_executor(self._thread, self._get, size)]

        def give_back() -> None:
            memory.clear()
            self._bytes -= size

        def drop() -> None:
            try:
                self._thread.submit(give_back)
            except RuntimeError:
                memory.clear()  # this was closed

        return Room(memory[0][:size], None, drop)

    def _get(self, size: int) -> memoryview:
        if self._bytes + size > MAX_OWN_BYTES:
            raise ArenaFullError(
                f"an item of {size} bytes finds no memory here: those that do not fit in "
                f"what NIXL reads to have {self._bytes} bytes, and may have {MAX_OWN_BYTES}"
            )
        try:
            memory = touched_memory(size)
        except OSError as error:
            raise ArenaFullError(
                f"an item of {size} bytes finds no memory here: {error}"
            ) from error
        self._bytes += size
        return memory

    def close(self) -> None:
        self._thread.shutdown(wait=False)


class NixlReading:
    """Connects to frontends and reads segments of their arenas. For use on one event loop.

    Items are used in place if only processes of this user can write there, as to the arena. If a
    network can reach the landing area, its writers are unknown: each piece is copied to private
    memory, and checked there.

    Attributes:
        on_lost: called when the process, with its connections, ended.
    """

    def __init__(self, network: NixlNetwork, slots: int, memory: int) -> None:
        """Allow ``slots`` concurrent reads and ``memory`` bytes of unreleased items (whole
        pages)."""
        self._network = network
        self._slots = slots
        self._landed = 0 if network.leaves_user else memory
        self._copied = memory - self._landed
        self._copies = Rooms(memoryview(b""))
        self._starting: asyncio.Task[None] | None = None
        self._link: ReaderLink | None = None
        self._closed = False
        self._own_memory = _OwnMemory()
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def free_slots(self) -> int:
        return self._slots if self._link is None else self._link.free_slots

    @property
    def stuck_for(self) -> float:
        return 0.0 if self._link is None else self._link.stuck_for

    @property
    def pid(self) -> int | None:
        return None if self._link is None else self._link.pid

    async def start(self) -> None:
        """Start the process unless it runs: about a second. Raises ArenaUnavailableError: closed.
        Raises ConfigurationError: NIXL can't be used here, or there is no memory for it."""
        if self._closed:
            raise ArenaUnavailableError("NIXL was shut down")
        if self._link is None:
            # One start for all waiters, which completes even if all are cancelled.
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._begin(), name="nixl-start")
            await asyncio.shield(self._starting)

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._link, self._copies = await asyncio.to_thread(self._start, loop)

    def _start(self, loop: asyncio.AbstractEventLoop) -> tuple[ReaderLink, Rooms]:
        copies = Rooms(touched_memory(self._copied)) if self._copied else self._copies
        link = ReaderLink(loop, self._network, self._slots, self._landed, lambda: self.on_lost())
        link.wait_until_ready(lambda: self._closed)
        return link, copies

    def restart(self) -> None:
        """Kill the process and its reads; another one follows."""
        if self._link is not None:
            self._link.restart()

    async def connect(self, offer: NixlOffer) -> None:
        """Connect to a frontend and check its probe. Raises ArenaUnavailableError."""
        await self._started.connect(offer.agent, offer.unpack_metadata())
        try:
            await self.check(offer)
        except ArenaUnavailableError:
            self.disconnect(offer.agent)
            raise

    def disconnect(self, agent: str) -> None:
        if self._link is not None:
            self._link.disconnect(agent)

    async def check(self, offer: NixlOffer) -> None:
        """Read the probe of a connected frontend's arena. Raises ArenaUnavailableError."""
        head = await self._peek(Source(offer.agent, offer.address, HEAD_SIZE))
        check_head(memoryview(head), offer.arena)

    async def read(self, offer: NixlOffer, metadata: NixlMetadata) -> Received:
        """Read a segment, check it, and build the item over it. Raises ArenaUnavailableError:
        unreadable. Raises ArenaFullError: no memory. Raises StaleSegmentError: reclaimed. Raises
        CorruptSegmentError: not the frontend's bytes."""
        layout = metadata.layout
        landing = self._started.landing
        room = (
            landing.rooms.take(layout.length)
            or self._copies.take(layout.length)
            or await self._own_memory.room(layout.length)
        )
        # Released only after all of its reads have ended.
        with undo_on_error(room.release):
            found = Checksum(offer.key, metadata.generation, metadata.mm_hash)
            source = Source(offer.agent, offer.address + metadata.offset, layout.length)
            await self._fill(room, landing, source, found)
            if found.digest(layout.length).hex() != metadata.checksum:
                await self._explain(offer, metadata, room.memory)
            envelope, parts = layout.split(room.memory)
            item = decode(bytes(envelope), parts)
        return Received(metadata.mm_hash, item, on_release=room.release)

    async def _fill(
        self, room: Room, landing: LandingArea, source: Source, found: Checksum
    ) -> None:
        """Read a segment. Returns when all of its reads have ended."""
        if room.offset is None:
            await self._copy(room, landing, source, found)
        else:
            await self._started.read(landing, source, found.add, lands_at=room.offset)

    async def _copy(
        self, room: Room, landing: LandingArea, source: Source, found: Checksum
    ) -> None:
        """Read a segment through slots, several pieces at a time."""
        starts = deque(piece_starts(source.size))

        async def read_one(start: int) -> None:
            target = room.memory[start : start + PIECE]

            def arrived(_: int, slot: memoryview) -> None:
                # A copy first: the slot may be changed after the check.
                copy_bytes(target, slot)
                found.add(start, target)

            piece = source._replace(address=source.address + start, size=target.nbytes)
            await self._started.read(landing, piece, arrived)

        async def read_some() -> None:
            with undo_on_error(starts.clear):
                while starts:
                    await read_one(starts.popleft())

        readers = [read_some() for _ in range(min(_PIECES_PER_ITEM, len(starts)))]
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _explain(self, offer: NixlOffer, metadata: NixlMetadata, segment: memoryview) -> None:
        """Raise StaleSegmentError or CorruptSegmentError for a wrong checksum."""
        # Read again, since it may have been overwritten during the read.
        again = await self._peek(Source(offer.agent, offer.address + metadata.offset, HEADER_SIZE))
        for header in (segment[:HEADER_SIZE], again):
            check_header(
                header, offer.arena.key, metadata.generation, metadata.mm_hash, metadata.layout
            )
        raise CorruptSegmentError(
            f"media item {metadata.mm_hash} did not arrive as it was sent: its checksum is wrong"
        )

    async def _peek(self, source: Source) -> bytes:
        seen: list[bytes] = []
        link = self._started
        await link.read(link.landing, source, lambda _, slot: seen.append(bytes(slot)))
        return seen[0]

    async def close(self) -> None:
        """End the process. Reads under way fail."""
        self._closed = True
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._link is not None:
            await self._link.close()
        self._own_memory.close()

    @property
    def _started(self) -> ReaderLink:
        if self._link is None:
            raise ArenaUnavailableError("nothing is read over NIXL at the moment")
        return self._link
