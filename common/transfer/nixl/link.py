"""A worker's end of the process that reads over NIXL: its landing area, reads and their answers."""

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
    """Who gets the last answer to a message, on the event loop; and what is called for each that is
    no error, by the thread that hears of it, and says whether it was the last."""

    answer: "asyncio.Future[None]"
    arrived: Callable[[], bool]


class Source(NamedTuple):
    """Some bytes of a frontend's memory: whose, and at which address there."""

    agent: str
    address: int
    size: int


class ReaderLink:
    """One process after the other, each with a landing area of its own. For use on one event
    loop."""

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

        Raises ConfigurationError: the network is impossible.
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
        return self._process.pid

    @property
    def landing(self) -> LandingArea:
        """That of the present process.

        Raises ArenaUnavailableError: there is no process at the moment.
        """
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
        """Get to know an agent. Raises ArenaUnavailableError: it can't be reached."""
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
        source: Source,
        arrived: Callable[[int, memoryview], object],
        lands_at: int | None = None,
    ) -> None:
        """Read some bytes, once there is a slot for it.

        Not to be cancelled: a slot would be given back that is still written to.

        Args:
            source: at most a slot's size, unless they land elsewhere.
            arrived: called for each piece that is there, in order, in the thread that hears of
                it: pieces are checked there while the process reads the next ones. Gets where
                the piece begins, and its bytes in the landing area.
            lands_at: where in the area it is read to instead of its slot.

        Raises:
            ArenaUnavailableError: it can't be read, and no more bytes will come.
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
        """What a message leaves to do on the event loop; in the thread that looks after the
        process."""
        if isinstance(message, Reading):
            return self._ready
        if not isinstance(message, Done | NixlFailed):
            return None
        awaited = self._awaited.get(message.number)
        if awaited is None:
            return None
        if isinstance(message, Done) and not awaited.arrived():
            return None
        # No answer counts twice: whoever took over the process may change the bytes in between.
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
