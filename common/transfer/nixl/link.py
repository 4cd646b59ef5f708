"""A worker's end of the process that reads over NIXL: landing area, reads and answers."""

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from common.errors import ArenaUnavailableError
from common.transfer.checksum import PIECE, piece_starts
from common.transfer.nixl.landing import LandingArea, area_size
from common.transfer.nixl.process import NixlProcess
from common.transfer.nixl_processes import (
    Connect,
    Disconnect,
    Done,
    FromReader,
    NixlFailed,
    NixlNetwork,
    Read,
    Reading,
    ToReader,
)

logger = logging.getLogger(__name__)

_READER: Final = "common.transfer.nixl_processes.reader"


class _Awaited(NamedTuple):
    """Future of the last answer to a message, set on the event loop. ``arrived`` is called per
    success, on the receiving thread, and returns whether it was the last."""

    answer: "asyncio.Future[None]"
    arrived: Callable[[], bool]


class Source(NamedTuple):
    """A range of a frontend's memory: agent, address and size."""

    agent: str
    address: int
    size: int


class ReaderLink:
    """One reading process at a time, each with its own landing area. For use on one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        network: NixlNetwork,
        slots: int,
        for_items: int,
        on_lost: Callable[[], None],
    ) -> None:
        """Start the process, from any thread. Raises ConfigurationError: the network is impossible.

        Args:
            slots: concurrent reads.
            for_items: bytes of the landing area for items used in place.
            on_lost: called on the event loop when a process, with its connections, ended.
        """
        self._slots = slots
        self._for_items = for_items
        self._on_lost = on_lost
        self._landing: LandingArea | None = None
        self._next_landing: LandingArea | None = None
        self._numbers = itertools.count()
        self._awaited: dict[int, _Awaited] = {}

        def told(message: FromReader) -> None:
            if (work := self._heard(message)) is not None:
                _call(loop, work)

        def lost() -> None:
            # Waits, so that no answer of the next process is taken for one of this.
            _call_and_wait(loop, self._lost)

        self._process: NixlProcess[ToReader, FromReader] = NixlProcess(
            _READER,
            network,
            self._make_landing,
            area_size(slots, for_items),
            True,
            FromReader,
            on_message=told,
            on_lost=lost,
        )
        self.wait_until_ready = self._process.wait_until_ready
        self.restart = self._process.restart

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def landing(self) -> LandingArea:
        """Landing area of the present process. Raises ArenaUnavailableError: none now."""
        if self._landing is None:
            raise ArenaUnavailableError("nothing is read over NIXL at the moment")
        return self._landing

    @property
    def free_slots(self) -> int:
        return self._slots if self._landing is None else self._landing.free

    @property
    def stuck_for(self) -> float:
        return 0.0 if self._landing is None else self._landing.stuck_for

    async def connect(self, agent: str, metadata: bytes) -> None:
        """Register an agent. Raises ArenaUnavailableError: it can't be reached."""
        await self._ask(Connect(next(self._numbers), agent, metadata))

    def disconnect(self, agent: str) -> None:
        """Forget an agent without reads."""
        try:
            self._process.send(Disconnect(agent))
        except ArenaUnavailableError as error:
            logger.debug("%s is forgotten already: %s", agent, error)

    async def read(
        self,
        landing: LandingArea,
        source: Source,
        arrived: Callable[[int, memoryview], object],
        lands_at: int | None = None,
    ) -> None:
        """Read some bytes, once there is a slot. Do not cancel: a slot in use would be released.

        Args:
            source: at most a slot's size, unless ``lands_at`` is given.
            arrived: called for each piece in order, on the receiving thread, so that checks overlap
                with reads. Gets the piece's start, and its bytes in the landing area.
            lands_at: offset in the area to read to, instead of the slot.

        Raises ArenaUnavailableError: the read failed, and no more bytes will come.
        """
        slot = await landing.take()
        try:
            if landing is not self._landing:
                raise ArenaUnavailableError("the process that reads over NIXL was replaced")
            offset = slot if lands_at is None else lands_at
            memory = landing.memory[offset : offset + source.size]
            starts = deque(piece_starts(source.size))

            def next_arrived() -> bool:
                start = starts.popleft()
                arrived(start, memory[start : start + PIECE])
                return not starts

            message = Read(next(self._numbers), *source[:2], offset, source.size, PIECE)
            await self._ask(message, next_arrived)
        finally:
            landing.give_back(slot)

    async def close(self) -> None:
        """End the process. Reads under way fail."""
        self._on_lost = lambda: None
        await asyncio.to_thread(self._process.close)
        self._lost()

    def _make_landing(self) -> int:
        self._next_landing = LandingArea(self._slots, self._for_items)
        return self._next_landing.descriptor

    async def _ask(
        self, message: Connect | Read, arrived: Callable[[], bool] = lambda: True
    ) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited[message.number] = _Awaited(answer, arrived)
        try:
            self._process.send(message)
            await answer
        finally:
            self._awaited.pop(message.number, None)

    def _heard(self, message: FromReader) -> Callable[[], None] | None:
        """Handle a message on the process's thread; return the part for the event loop."""
        if isinstance(message, Reading):
            return self._ready
        if not isinstance(message, Done | NixlFailed):
            return None
        awaited = self._awaited.get(message.number)
        if awaited is None:
            return None
        if isinstance(message, Done) and not awaited.arrived():
            return None
        # No answer counts twice: a compromised process could change the bytes in between.
        self._awaited.pop(message.number, None)
        return partial(_answer, awaited.answer, message)

    def _ready(self) -> None:
        self._landing, self._next_landing = self._next_landing, None

    def _lost(self) -> None:
        self._landing = None
        for answer, _ in self._awaited.values():
            if not answer.done():
                answer.set_exception(
                    ArenaUnavailableError("the process that reads over NIXL ended")
                )
        self._on_lost()


def _answer(answer: "asyncio.Future[None]", message: Done | NixlFailed) -> None:
    if answer.done():
        return
    if isinstance(message, NixlFailed):
        answer.set_exception(ArenaUnavailableError(message.reason))
    else:
        answer.set_result(None)


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Run a call on the event loop, in order."""
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        logger.debug("the event loop ended before the process that reads over NIXL")


def _call_and_wait(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Run a call on the event loop and wait for it, unless the loop has stopped."""
    done = threading.Event()

    def call() -> None:
        try:
            work()
        finally:
            done.set()

    _call(loop, call)
    while loop.is_running() and not done.wait(0.1):
        pass
