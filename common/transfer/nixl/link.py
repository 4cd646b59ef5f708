"""A worker's end of the process that reads over NIXL: its landing area, reads and their answers."""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from common.errors import ArenaUnavailableError
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
    """What is done once an answer comes.

    Attributes:
        answer: gets it, on the event loop.
        arrived: called before, by the thread that hears of it, if there was no error.
    """

    answer: "asyncio.Future[None]"
    arrived: Callable[[], object]


class Piece(NamedTuple):
    """Some bytes of a frontend's memory.

    Attributes:
        agent: whose they are.
        address: of them there.
        size: one slot's at most.
    """

    agent: str
    address: int
    size: int


class ReaderLink:
    """One process after the other, each with a landing area of its own. For use on one event
    loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        network: NixlNetwork,
        slots: int,
        for_items: int,
        on_lost: Callable[[], None],
    ) -> None:
        """Start the process; from any thread.

        Args:
            slots: reads that go on at the same time.
            for_items: bytes of the landing area in which items are used where they land.
            on_lost: called on the event loop when a process ended, and with it all connections.

        Raises:
            ConfigurationError: the network is impossible.
        """
        self._slots = slots
        self._for_items = for_items
        self._on_lost = on_lost
        self._landing: LandingArea | None = None
        self._next_landing: LandingArea | None = None
        self._numbers = itertools.count()
        self._awaited: dict[int, _Awaited] = {}

        def told(message: FromReader) -> None:
            _call(loop, partial(self._answered, message, self._heard(message)))

        def lost() -> None:
            # So that no answer of the next process is taken for one of this.
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
        """Of the process, None if there is none."""
        return self._process.pid

    @property
    def landing(self) -> LandingArea:
        """That of the present process.

        Raises:
            ArenaUnavailableError: there is no process at the moment.
        """
        if self._landing is None:
            raise ArenaUnavailableError("nothing is read over NIXL at the moment")
        return self._landing

    @property
    def free_slots(self) -> int:
        """Slots that nothing is read to."""
        return self._slots if self._landing is None else self._landing.free

    @property
    def stuck_for(self) -> float:
        """Seconds for which all slots have been in use and no read ended."""
        return 0.0 if self._landing is None else self._landing.stuck_for

    async def connect(self, agent: str, metadata: bytes) -> None:
        """Get to know an agent.

        Raises:
            ArenaUnavailableError: it can't be reached.
        """
        await self._ask(Connect(next(self._numbers), agent, metadata))

    def disconnect(self, agent: str) -> None:
        """Forget an agent that nothing is read from any more."""
        try:
            self._process.send(Disconnect(agent))
        except ArenaUnavailableError as error:
            logger.debug("%s is forgotten already: %s", agent, error)

    async def read(
        self,
        landing: LandingArea,
        piece: Piece,
        arrived: Callable[[memoryview], object],
        lands_at: int | None = None,
    ) -> None:
        """Read a piece, once there is a slot for it.

        Not to be cancelled: a slot would be given back that is still written to.

        Args:
            arrived: called with the slot's bytes when they are there, in the thread that hears of
                it: pieces are checked there while the process reads the next ones.
            lands_at: where in the area it is read to instead of its slot.

        Raises:
            ArenaUnavailableError: it can't be read, and no more bytes will come.
        """
        slot = await landing.take()
        try:
            if landing is not self._landing:
                raise ArenaUnavailableError("the process that reads over NIXL was replaced")
            offset = slot.offset if lands_at is None else lands_at
            message = Read(next(self._numbers), piece.agent, piece.address, offset, piece.size)
            await self._ask(message, partial(arrived, slot.memory[: piece.size]))
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
        self, message: Connect | Read, arrived: Callable[[], object] = lambda: None
    ) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited[message.number] = _Awaited(answer, arrived)
        try:
            self._process.send(message)
            await answer
        finally:
            self._awaited.pop(message.number, None)

    def _heard(self, message: FromReader) -> _Awaited | None:
        """Who waits for a message; in the thread that looks after the process."""
        if not isinstance(message, Done | NixlFailed):
            return None
        # At most once: whoever took over the process may say so again, after changing the bytes.
        awaited = self._awaited.pop(message.number, None)
        if awaited is not None and isinstance(message, Done):
            awaited.arrived()
        return awaited

    def _answered(self, message: FromReader, awaited: _Awaited | None) -> None:
        if isinstance(message, Reading):
            self._landing, self._next_landing = self._next_landing, None
        if awaited is None or awaited.answer.done():
            return
        if isinstance(message, NixlFailed):
            awaited.answer.set_exception(ArenaUnavailableError(message.reason))
        else:
            awaited.answer.set_result(None)

    def _lost(self) -> None:
        self._landing = None
        for answer, _ in self._awaited.values():
            if not answer.done():
                answer.set_exception(
                    ArenaUnavailableError("the process that reads over NIXL ended")
                )
        self._on_lost()


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
