"""A worker's end of the process that reads over NIXL: reads, copies what came, and checks it."""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from vllm.multimodal.inputs import MultiModalKwargsItem

from common.errors import (
    ArenaUnavailableError,
    CorruptSegmentError,
)
from common.transfer.arena import HEAD_SIZE, HEADER_SIZE, check_head, check_header, copy_bytes
from common.transfer.base import Received
from common.transfer.checksum import checksum
from common.transfer.codec import decode
from common.transfer.metadata import NixlMetadata
from common.transfer.nixl.copies import Copies
from common.transfer.nixl.landing import LandingArea
from common.transfer.nixl.process import NixlProcess
from common.transfer.nixl_offer import NixlOffer
from common.transfer.nixl_processes import (
    Connect,
    Disconnect,
    Done,
    FromReader,
    NixlFailed,
    NixlNetwork,
    Read,
    ToReader,
)
from common.undo import undo_on_error

logger = logging.getLogger(__name__)

_READER: Final = "common.transfer.nixl_processes.reader"

_Result = TypeVar("_Result")

_AT_ONCE: Final = 256 << 10
"""Bytes that are copied and checked on the event loop: 30 us, less than a thread's start."""


class NixlReading:
    """Connects to frontends and reads segments of their arenas. For use on one event loop.

    Attributes:
        on_lost: called when the process ended, and with it all connections.
    """

    def __init__(self, network: NixlNetwork, slots: int, slot_size: int) -> None:
        """
        Args:
            slots: how many reads go on at the same time.
            slot_size: bytes that each takes at once.
        """
        self._network = network
        self._slots = slots
        self._slot_size = slot_size
        self._starting: asyncio.Task[None] | None = None
        self._landing: LandingArea | None = None
        self._copies = Copies(0, 0)
        self._process: NixlProcess[ToReader, FromReader] | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._closed = False
        # One thread: page faults of many at once stall the event loop.
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="nixl-check")
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def free_slots(self) -> int:
        """Slots that nothing is read to."""
        return self._slots if self._landing is None else self._landing.free

    @property
    def slots(self) -> int:
        """All of them."""
        return self._slots

    @property
    def pid(self) -> int | None:
        """Of the process, None if there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process unless it was: about a second.

        Raises:
            ArenaUnavailableError: there is no memory for it, or this was closed.
            ConfigurationError: NIXL can't be used here.
        """
        if self._closed:
            raise ArenaUnavailableError("NIXL was shut down")
        if self._process is None:
            # One start for all who wait, and it ends also when nobody does any more.
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._begin(), name="nixl-start")
            await asyncio.shield(self._starting)

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._landing, self._copies, self._process = await asyncio.to_thread(self._start, loop)

    def _start(
        self, loop: asyncio.AbstractEventLoop
    ) -> tuple[LandingArea, Copies, NixlProcess[ToReader, FromReader]]:
        def told(message: FromReader) -> None:
            _call(loop, lambda: self._answered(message))

        def lost() -> None:
            # So that no answer of the next process is taken for one of this.
            _call_and_wait(loop, self._lost)

        landing = LandingArea(self._slots, self._slot_size)
        with undo_on_error(landing.close):
            process: NixlProcess[ToReader, FromReader] = NixlProcess(
                _READER,
                self._network,
                landing.open,
                landing.size,
                True,
                FromReader,
                on_message=told,
                on_lost=lost,
            )
            copies = Copies(self._slots, landing.slot_size)
            process.wait_until_ready(lambda: self._closed)
        return landing, copies, process

    def restart(self) -> None:
        """End the process, and with it all reads; another one follows."""
        if self._process is not None:
            self._process.restart()

    async def connect(self, offer: NixlOffer) -> None:
        """Connect to a frontend and check that it is the one.

        Raises:
            ArenaUnavailableError: it can't be reached, or is another.
        """
        number = next(self._numbers)
        await self._ask(number, Connect(number, offer.agent, offer.unpack_metadata()))
        try:
            await self.check(offer)
        except ArenaUnavailableError:
            self.disconnect(offer.agent)
            raise

    async def check(self, offer: NixlOffer) -> None:
        """Read the probe of a connected frontend's arena.

        Raises:
            ArenaUnavailableError: it can't be read, or is another.
        """
        head = memoryview(bytearray(HEAD_SIZE))
        await self._fill(head, offer.agent, offer.address)
        check_head(head, offer.arena)

    async def read(self, offer: NixlOffer, metadata: NixlMetadata) -> Received:
        """Read a segment, check it, and build the item over it.

        Raises:
            ArenaUnavailableError: it can't be read.
            StaleSegmentError: it was reclaimed.
            CorruptSegmentError: the bytes are not those that the frontend wrote.
        """
        layout = metadata.layout
        source = offer.address + metadata.offset
        memory = [await self._in_thread(layout.length, partial(self._copies.take, layout.length))]
        give_back = partial(self._give_back, memory)
        with undo_on_error(give_back):
            item = await self._checked(offer, metadata, source, memory[0][: layout.length])
        return Received(metadata.mm_hash, item, on_release=give_back)

    def _give_back(self, memory: list[memoryview]) -> None:
        """Give the only reference back: where it is the last, unmapping takes long."""

        def drop() -> None:
            self._copies.give_back(memory.pop())

        try:
            self._checker.submit(drop)
        except RuntimeError:
            drop()  # this was closed

    async def _checked(
        self, offer: NixlOffer, metadata: NixlMetadata, source: int, segment: memoryview
    ) -> MultiModalKwargsItem:
        """The item, over ``segment``."""
        layout = metadata.layout
        await self._fill(segment, offer.agent, source)
        found = await self._in_thread(
            layout.length,
            partial(
                checksum,
                offer.key,
                metadata.generation,
                metadata.mm_hash,
                segment[HEADER_SIZE:],
            ),
        )
        if found.hex() != metadata.checksum:
            await self._explain(offer, metadata, segment)
        envelope, parts = layout.split(segment)
        return decode(bytes(envelope), parts)

    async def _explain(self, offer: NixlOffer, metadata: NixlMetadata, segment: memoryview) -> None:
        """Why bytes are not what they should be: raises StaleSegmentError or
        CorruptSegmentError.
        """
        # Once more, since it may have been overwritten while it was read.
        again = memoryview(bytearray(HEADER_SIZE))
        await self._fill(again, offer.agent, offer.address + metadata.offset)
        for header in (segment[:HEADER_SIZE], again):
            check_header(
                header, offer.arena.key, metadata.generation, metadata.mm_hash, metadata.layout
            )
        raise CorruptSegmentError(
            f"media item {metadata.mm_hash} did not arrive as it was sent: its checksum is wrong"
        )

    def disconnect(self, agent: str) -> None:
        """Forget a frontend that nothing is read from any more."""
        try:
            self._send(Disconnect(agent))
        except ArenaUnavailableError as error:
            logger.debug("%s is forgotten already: %s", agent, error)

    async def close(self) -> None:
        """End the process. Reads under way fail."""
        self._closed = True
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        self._lost()
        if self._landing is not None:
            self._landing.close()
            self._landing = None
        self._checker.shutdown(wait=False)

    async def _fill(self, memory: memoryview, agent: str, remote: int) -> None:
        """Fill memory of this process's own with bytes of a frontend.

        Not to be cancelled: a slot would be given back that is still written to.
        """
        landing = self._landing
        if landing is None:
            raise ArenaUnavailableError("nothing is read over NIXL at the moment")
        for start in range(0, memory.nbytes, landing.slot_size):
            part = memory[start : start + landing.slot_size]
            slot = await landing.take()
            try:
                number = next(self._numbers)
                await self._ask(
                    number, Read(number, agent, remote + start, slot.offset, part.nbytes)
                )
                # A copy first: what is in the slot may be changed after it was checked.
                source = slot.memory[: part.nbytes]
                await self._in_thread(part.nbytes, partial(copy_bytes, part, source))
            finally:
                landing.give_back(slot)

    async def _in_thread(self, size: int, work: Callable[[], _Result]) -> _Result:
        if size <= _AT_ONCE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._checker, work)

    async def _ask(self, number: int, message: Connect | Read) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(message)
            await answer
        finally:
            self._answers.pop(number, None)

    def _send(self, message: ToReader) -> None:
        if self._process is None:
            raise ArenaUnavailableError("nothing is read over NIXL at the moment")
        self._process.send(message)

    def _answered(self, message: FromReader) -> None:
        if not isinstance(message, Done | NixlFailed):
            return
        answer = self._answers.get(message.number)
        if answer is None or answer.done():
            return
        if isinstance(message, Done):
            answer.set_result(None)
        else:
            answer.set_exception(ArenaUnavailableError(message.reason))

    def _lost(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(
                    ArenaUnavailableError("the process that reads over NIXL ended")
                )
        if not self._closed:
            self.on_lost()


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Have something done on the event loop, in order."""
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        logger.debug("the event loop ended before the process that reads over NIXL")


def _call_and_wait(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """The same, and wait until it was, unless the loop has stopped."""
    done = threading.Event()

    def call() -> None:
        try:
            work()
        finally:
            done.set()

    _call(loop, call)
    while loop.is_running() and not done.wait(0.1):
        pass
