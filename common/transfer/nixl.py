"""Other hosts: the arena is registered with NIXL once, and workers READ from it."""

import asyncio
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple, TypeVar

from common.errors import (
    ArenaUnavailableError,
    CorruptSegmentError,
    TransferError,
    TransferTimeoutError,
)
from common.transfer import pages
from common.transfer.arena import Arena, Lease
from common.transfer.arena_layout import SEGMENTS_START
from common.transfer.arena_sender import ArenaSender
from common.transfer.base import Loan, MmKwargsReceiver, Received, SentHook
from common.transfer.metadata import NixlMetadata, Transport
from common.transfer.nixl_agent import NixlAgent, NixlOffer
from common.transfer.nixl_reader import NixlReader
from common.transfer.nixl_thread import Steps

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_IDLE_PAUSE: Final = 0.02
_LENDING_PAUSE: Final = 0.001

_FIRST_LOOK: Final = 1.0
_LONGEST_LOOK: Final = 60.0
"""Seconds between looks whether a frontend that left has ended, and between attempts to reach
one whose connection broke; from the first, ever longer."""


class NixlSender(ArenaSender):
    """Lends segments of an arena to workers anywhere.

    Attributes:
        offer: goes to workers, once.
    """

    transport: ClassVar[Transport] = "nixl"

    def __init__(self, arena: Arena, *, on_sent: SentHook | None = None) -> None:
        """Make the agent and register the arena: about half a second, once.

        Close this before the arena.

        Raises:
            ConfigurationError: NIXL can't be used here.
            ArenaUnavailableError: the arena can't be registered.
        """
        super().__init__(arena, on_sent=on_sent)
        # Keeps the memory mapped for as long as it is registered.
        self._memory = arena.memory
        self._agent = NixlAgent("frontend")
        address = pages.address_of(self._memory)
        self._registration = self._agent.register(address, self._memory.nbytes)
        self.offer = NixlOffer(
            agent=self._agent.name,
            metadata=NixlOffer.pack_metadata(self._agent.metadata()),
            address=address,
            arena=arena.offer,
        )
        self._loans = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="nixl-frontend", daemon=True)
        self._thread.start()

    def _describe(self, lease: Lease) -> NixlMetadata:
        return NixlMetadata(
            mm_hash=lease.mm_hash,
            envelope_size=lease.layout.envelope_size,
            buffer_sizes=lease.layout.buffer_sizes,
            agent=self.offer.agent,
            offset=lease.offset,
            generation=lease.generation,
        )

    def _loan(self, lease: Lease) -> Loan:
        with self._changed:
            self._loans += 1
            if self._loans == 1:
                self._changed.notify()

        def end() -> None:
            lease.release()
            with self._changed:
                self._loans -= 1

        return Loan(self._describe(lease), on_release=end)

    def _serve(self) -> None:
        """Move what others read from us.

        Over RDMA or within a host a READ needs that for connecting only. Over TCP this
        process sends the bytes itself, so it looks often while somebody is about to read;
        not more often than a reader notices, since each look takes the interpreter's lock.
        """
        while True:
            with self._changed:
                if not self._closed:
                    self._changed.wait(_LENDING_PAUSE if self._loans else _IDLE_PAUSE)
                if self._closed:
                    return
            self._agent.progress()

    def close(self) -> None:
        """Stop serving and deregister the arena. The second and later calls do nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._agent.deregister(self._registration)
        del self._agent
        self._memory = memoryview(b"")


class _Left(NamedTuple):
    """A frontend whose connection is kept, until the frontend or, if the connection is broken,
    the last read over it has ended.
    """

    offer: NixlOffer
    broken: bool
    watch: "asyncio.Task[None]"


class NixlReceiver(MmKwargsReceiver[NixlMetadata]):
    """Reads segments into registered memory of its own."""

    transport: ClassVar[Transport] = "nixl"
    metadata_type = NixlMetadata

    MAX_OVERDUE: ClassVar[int] = 4
    """So many reads from one frontend may be overdue at once; then it is left alone, since
    none of their buffers can be used until the bytes came or the connection broke."""

    def __init__(
        self, *, slots: int = 8, slot_size: int = 32 << 20, deadline: float = 10.0
    ) -> None:
        """Make the agent and its pool of memory: about half a second.

        Args:
            slots: how many items the pool holds.
            slot_size: bytes of the largest; larger ones, or more of them, get memory that is
                registered for the time.
            deadline: seconds that a read may take.

        Raises:
            ConfigurationError: NIXL can't be used here.
            ArenaUnavailableError: the pool can't be registered.
        """
        super().__init__()
        self._deadline = deadline
        self._reader = NixlReader(slots, slot_size)
        self._offers: dict[str, NixlOffer] = {}
        self._left: dict[str, _Left] = {}
        self._mending: dict[str, asyncio.Task[None]] = {}
        self._attaching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reading: Counter[str] = Counter()
        self._overdue: Counter[str] = Counter()

    @property
    def free_slots(self) -> int:
        """Slots of the pool that hold no item."""
        return self._reader.buffers.free

    async def attach(self, offer: NixlOffer) -> None:
        """Connect to a frontend and prove it by reading the arena's probe.

        Raises:
            ArenaUnavailableError: it can't be reached, or the probe is wrong.
            TransferTimeoutError: it doesn't answer within the deadline.
        """
        self._stop_mending(offer.agent)
        await self._attach(offer)

    def detach(self, agent: str) -> None:
        """Let go of a frontend that left, or can't be reached for a while; items received from
        it stay usable.
        """
        self._stop_mending(agent)
        self._let_go(agent, broken=False)

    async def _attach(self, offer: NixlOffer) -> None:
        agent = offer.agent
        async with self._attaching[agent]:
            if self._offers.get(agent) == offer:
                return
            left = self._left.get(agent)
            lives = (
                left is not None
                and left.offer == offer
                and not left.broken
                and await self._lives(offer)
            )
            if lives and self._left.get(agent) is left:  # its watch didn't find otherwise
                self._left.pop(agent).watch.cancel()
                self._offers[agent] = offer
                return
            if self._reading[agent]:
                # NIXL would forget these reads, while their bytes may still come.
                raise ArenaUnavailableError(f"earlier reads from {agent} have not ended")
            if agent in self._left:
                self._left[agent].watch.cancel()
                self._forget(agent)
            await self._within_deadline(agent, self._reader.connect(offer), _nothing)
            self._offers[agent] = offer

    def _let_go(self, agent: str, *, broken: bool) -> None:
        offer = self._offers.pop(agent, None)
        if offer is not None:
            watch = asyncio.create_task(self._forget_once_gone(offer), name=f"forget-{agent}")
            self._left[agent] = _Left(offer, broken, watch)

    async def _receive(self, metadata: NixlMetadata, frames: Sequence[memoryview]) -> Received:
        offer = self._offers.get(metadata.agent)
        if offer is None:
            raise ArenaUnavailableError(f"{metadata.agent} isn't connected here")
        if self._overdue[metadata.agent] >= self.MAX_OVERDUE:
            raise ArenaUnavailableError(
                f"{metadata.agent} doesn't answer: {self.MAX_OVERDUE} reads are overdue"
            )
        length = metadata.layout.length
        if metadata.offset < SEGMENTS_START or metadata.offset + length > offer.arena.size:
            raise CorruptSegmentError(
                f"no segment of {length} bytes can be at {metadata.offset} in an arena of "
                f"{offer.arena.size} bytes"
            )
        try:
            return await self._within_deadline(
                metadata.agent, self._reader.read(offer, metadata), Received.release
            )
        except ArenaUnavailableError:
            if self._offers.get(metadata.agent) is offer:  # the first that notices
                self._let_go(metadata.agent, broken=True)
                mending = asyncio.create_task(self._mend(offer), name=f"mend-{metadata.agent}")
                self._mending[metadata.agent] = mending
            raise

    async def close(self) -> None:
        self._offers.clear()
        for left in self._left.values():
            left.watch.cancel()
        for mending in self._mending.values():
            mending.cancel()
        await asyncio.to_thread(self._reader.thread.close)

    async def _within_deadline(
        self, agent: str, steps: Steps[_Result], discard: Callable[[_Result], None]
    ) -> _Result:
        ended = overdue = False
        self._reading[agent] += 1

        def finished() -> None:
            nonlocal ended
            ended = True
            self._reading[agent] -= 1
            if overdue:
                self._overdue[agent] -= 1

        try:
            async with asyncio.timeout(self._deadline):
                return await self._reader.thread.run_async(
                    steps, discard=discard, finished=finished
                )
        except TimeoutError as error:
            if not ended:
                overdue = True
                self._overdue[agent] += 1
            raise TransferTimeoutError(
                f"{agent} could not be read over NIXL within {self._deadline} s"
            ) from error

    async def _mend(self, offer: NixlOffer) -> None:
        """Connect again after a connection broke, which NIXL doesn't do by itself.

        Meanwhile items are refused, so they come inline.
        """
        logger.warning("the NIXL connection to %s broke: making a new one", offer.agent)
        interval = _FIRST_LOOK
        while True:
            await asyncio.sleep(interval)
            interval = min(interval * 2, _LONGEST_LOOK)
            try:
                await self._attach(offer)
            except TransferError as error:
                logger.info("not connected to %s yet: %s", offer.agent, error)
                continue
            logger.info("connected to %s again", offer.agent)
            del self._mending[offer.agent]
            return

    def _stop_mending(self, agent: str) -> None:
        if mending := self._mending.pop(agent, None):
            mending.cancel()

    async def _forget_once_gone(self, offer: NixlOffer) -> None:
        """Disconnect from a frontend that left once it has ended, and not before.

        NIXL doesn't close its connection to a peer that lives: each frontend that is lost and
        found again, after a pause for instance, would cost a socket at both ends.
        """
        interval = _FIRST_LOOK
        while await self._lives(offer):
            await asyncio.sleep(interval)
            interval = min(interval * 2, _LONGEST_LOOK)
        self._forget(offer.agent)

    async def _lives(self, offer: NixlOffer) -> bool:
        """Whether a frontend can be read from. Says yes while that isn't known."""
        if self._reading[offer.agent]:
            return True
        try:
            await self._within_deadline(offer.agent, self._reader.check(offer), _nothing)
        except TransferTimeoutError:
            return True
        except ArenaUnavailableError:
            return False
        return True

    def _forget(self, agent: str) -> None:
        """Disconnect from a frontend that nothing is read from."""
        del self._left[agent], self._reading[agent], self._overdue[agent]
        self._reader.thread.start(self._reader.disconnect(agent))


def _nothing(_: None) -> None:
    pass
