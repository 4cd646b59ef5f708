"""The worker's end: it READs from the arena of a frontend on any host.

The worker's process has no agent, see :mod:`common.transfer.nixl.process`. Connections to frontends
are kept after these leave, and reconnected when they break.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from common.aio.cleanup import undo_on_error
from common.aio.supervised import supervise
from common.backoff import Backoff
from common.errors import (
    ArenaUnavailableError,
    CorruptSegmentError,
    TransferError,
    TransferTimeoutError,
)
from common.transfer.arena import SEGMENTS_START
from common.transfer.base import Accepted, Attachment, Attachments, MmKwargsReceiver, Received
from common.transfer.handshake import NixlOffer, TransferOffer, TransferReply
from common.transfer.metadata import NixlMetadata, Transport
from common.transfer.nixl.reading import NixlReading
from common.transfer.nixl_processes import NixlNetwork

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

MAX_OVERDUE: Final = 4
"""Overdue reads from one frontend, which is then left alone: none of their buffers can be used."""

_FIRST_PAUSE: Final = 1.0
_MAX_PAUSE_S: Final = 60.0
"""Seconds between looks whether a frontend that left has ended, and between attempts to reach one
whose connection broke."""


class _Left(NamedTuple):
    """A connection kept until its frontend, or if broken its last read, has ended."""

    offer: NixlOffer
    broken: bool
    watch: "asyncio.Task[None]"


class NixlPeers:
    """Keeps a worker's connections, and enforces a deadline (seconds) for its reads."""

    def __init__(self, reading: NixlReading, deadline: float) -> None:
        self.deadline = deadline
        self._reader = reading
        reading.on_lost = self._all_broke
        self._offers: dict[str, NixlOffer] = {}
        self._left: dict[str, _Left] = {}
        self._mending: dict[str, asyncio.Task[None]] = {}
        self._attaching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reading: Counter[str] = Counter()
        self._overdue: Counter[str] = Counter()
        self._running: set[asyncio.Task[Any]] = set()

    def offer(self, agent: str) -> NixlOffer:
        """Return a readable frontend's offer. Raises ArenaUnavailableError."""
        offer = self._offers.get(agent)
        if offer is None:
            raise ArenaUnavailableError(f"{agent} isn't connected here")
        if self._overdue[agent] >= MAX_OVERDUE:
            raise ArenaUnavailableError(f"{agent} doesn't answer: {MAX_OVERDUE} reads are overdue")
        return offer

    async def attach(self, offer: NixlOffer) -> None:
        """Connect to a frontend and prove it by reading the arena's probe. Raises
        ArenaUnavailableError: unreachable, or a wrong probe. Raises TransferTimeoutError."""
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
            await self.within_deadline(
                agent, self._reader.connect(offer), lambda _: self._disconnect(agent)
            )
            self._offers[agent] = offer

    def detach(self, agent: str) -> None:
        """Detach a frontend that left or is unreachable; its received items stay usable."""
        self._stop_mending(agent)
        self._let_go(agent, broken=False)

    def broke(self, offer: NixlOffer) -> None:
        """Reconnect after a failed read."""
        agent = offer.agent
        if self._offers.get(agent) is offer:  # the first that notices
            self._stop_mending(agent)
            self._let_go(agent, broken=True)
            self._mending[agent] = asyncio.create_task(
                supervise("NIXL mending", lambda: self._mend(offer)), name=f"mend-{agent}"
            )

    def close(self) -> None:
        """Detach all frontends. Reads under way continue."""
        self._offers.clear()
        for left in self._left.values():
            left.watch.cancel()
        for mending in self._mending.values():
            mending.cancel()

    async def ended(self) -> None:
        """Wait until all tasks have ended: soon, once the reading process is closed. Drops the
        tasks, whose errors would refer to the memory."""
        watching = [left.watch for left in self._left.values()]
        await asyncio.gather(*watching, *self._mending.values(), return_exceptions=True)
        while self._running:
            await asyncio.wait(self._running)
        self._left.clear()
        self._mending.clear()

    async def within_deadline(
        self,
        agent: str,
        work: Coroutine[Any, Any, _Result],
        undo: Callable[[_Result], object] = lambda _: None,
    ) -> _Result:
        """Return a read's result within the deadline, or raise TransferTimeoutError: the read
        continues and holds its slot. ``undo`` gets a result without a waiter."""
        overdue = abandoned = False
        self._reading[agent] += 1
        task = asyncio.create_task(work, name=f"nixl-{agent}")
        self._running.add(task)

        def late() -> None:
            # Also without a waiter: it holds its slot all the same.
            nonlocal overdue
            overdue = True
            self._overdue[agent] += 1
            self._free_slots_by_force()

        lateness = asyncio.get_running_loop().call_later(self.deadline, late)

        def finished(_: object) -> None:
            lateness.cancel()
            self._running.discard(task)
            self._reading[agent] -= 1
            if overdue:
                self._overdue[agent] -= 1
            if task.cancelled():
                return
            if error := task.exception():
                logger.debug("a NIXL read ended: %s", error)
            elif abandoned:
                undo(task.result())

        def abandon() -> None:
            nonlocal abandoned
            abandoned = True
            if task.done() and not task.cancelled() and task.exception() is None:
                undo(task.result())  # it succeeded in the turn in which its caller was cancelled

        task.add_done_callback(finished)
        with undo_on_error(abandon):
            try:
                async with asyncio.timeout(self.deadline):
                    return await asyncio.shield(task)
            except TimeoutError as error:
                raise TransferTimeoutError(
                    f"{agent} could not be read over NIXL within {self.deadline} s"
                ) from error

    def _free_slots_by_force(self) -> None:
        """Restart the process if unresponsive frontends hold all slots."""
        if self._reader.stuck_for > self.deadline / 2:
            logger.warning("all NIXL reads are overdue; restarting the NIXL process")
            self._reader.restart()

    def _all_broke(self) -> None:
        for offer in list(self._offers.values()):
            self.broke(offer)

    def _let_go(self, agent: str, *, broken: bool) -> None:
        offer = self._offers.pop(agent, None)
        if offer is not None:
            watch = asyncio.create_task(
                supervise("NIXL watch", lambda: self._forget_once_gone(offer)),
                name=f"forget-{agent}",
            )
            self._left[agent] = _Left(offer, broken, watch)

    async def _mend(self, offer: NixlOffer) -> None:
        """Reconnect, which NIXL doesn't do by itself. Meanwhile items come inline."""
        logger.warning("the NIXL connection to %s broke; reconnecting", offer.agent)
        backoff = Backoff(_FIRST_PAUSE, _MAX_PAUSE_S)
        while True:
            await asyncio.sleep(backoff.next_s())
            try:
                await self.attach(offer)
            except TransferError as error:
                logger.info("not connected to %s yet: %s", offer.agent, error)
                continue
            logger.info("connected to %s again", offer.agent)
            del self._mending[offer.agent]
            break

    def _stop_mending(self, agent: str) -> None:
        if mending := self._mending.pop(agent, None):
            mending.cancel()

    async def _forget_once_gone(self, offer: NixlOffer) -> None:
        """Disconnect from a frontend once it has ended. NIXL doesn't close its connection to a
        living peer: a reconnect would cost a socket at both ends."""
        backoff = Backoff(_FIRST_PAUSE, _MAX_PAUSE_S)
        while await self._lives(offer):  # noqa: ASYNC110  # no event tells of its end
            await asyncio.sleep(backoff.next_s())
        self._forget(offer.agent)

    async def _lives(self, offer: NixlOffer) -> bool:
        """Return whether a frontend can be read from; True while unknown."""
        if self._reading[offer.agent]:
            return True
        try:
            await self.within_deadline(offer.agent, self._reader.check(offer))
        except TransferTimeoutError:
            return True
        except ArenaUnavailableError:
            return False
        return True

    def _forget(self, agent: str) -> None:
        """Disconnect from a frontend without reads."""
        del self._left[agent], self._reading[agent], self._overdue[agent]
        self._disconnect(agent)

    def _disconnect(self, agent: str) -> None:
        self._reader.disconnect(agent)


class NixlReceiver(MmKwargsReceiver[NixlMetadata]):
    """Reads segments through a process of its own."""

    transport: ClassVar[Transport] = "nixl"
    metadata_type = NixlMetadata

    def __init__(
        self,
        network: NixlNetwork,
        *,
        memory: int = 256 << 20,
        slots: int = 32,
        deadline: float = 10.0,
    ) -> None:
        """Start nothing: the process starts with the first frontend that needs it.

        Args:
            memory: bytes for items until they are released, a multiple of the page size; further
                items get memory of their own.
            slots: concurrent reads, of an item or a piece of 2 MiB.
            deadline: seconds that a read may take.

        Raises ConfigurationError: the network is impossible.
        """
        super().__init__()
        network.transports()
        self.network = network
        self._reading = NixlReading(network, slots, memory)
        self._peers = NixlPeers(self._reading, deadline)
        self._attachments = Attachments(self._peers.detach)

    async def start(self) -> None:
        """Start the process now: about a second. Raises ConfigurationError."""
        await self._reading.start()

    @property
    def free_slots(self) -> int:
        return self._reading.free_slots

    def add_prospects(self, reply: TransferReply) -> TransferReply:
        reaches = self.network.reaches(same_ipc=reply.same_ipc, same_loopback=reply.same_loopback)
        return reply.model_copy(update={"could_nixl": reaches})

    def obstacle(self, reply: TransferReply) -> str:
        if reply.could_nixl:
            return ""
        return "this worker's NIXL doesn't lead there without --nixl-interface"

    async def accept(self, offer: TransferOffer, reply: TransferReply) -> Accepted | None:
        if offer.nixl is None:
            return None
        attachment = await self.attach(offer.nixl)
        return Accepted(reply.model_copy(update={"nixl": offer.nixl.agent}), attachment)

    async def attach(self, offer: NixlOffer) -> Attachment:
        """Connect to a frontend, and reconnect until all attachments are detached. Raises
        ArenaUnavailableError: unreachable, or a wrong probe. Raises ConfigurationError,
        TransferTimeoutError."""
        await self._reading.start()
        await self._peers.attach(offer)
        return self._attachments.add(offer.agent)

    async def _receive(self, metadata: NixlMetadata, frames: Sequence[memoryview]) -> Received:
        offer = self._peers.offer(metadata.agent)
        length = metadata.layout.length
        if metadata.offset < SEGMENTS_START or metadata.offset + length > offer.arena.size:
            raise CorruptSegmentError(
                f"no segment of {length} bytes can be at {metadata.offset} in an arena of "
                f"{offer.arena.size} bytes"
            )
        try:
            return await self._peers.within_deadline(
                metadata.agent, self._reading.read(offer, metadata), Received.release
            )
        except ArenaUnavailableError:
            self._peers.broke(offer)
            raise

    async def close(self) -> None:
        self._peers.close()
        await asyncio.shield(self._reading.close())
        # They would hold their slots until the event loop's next turn.
        await self._peers.ended()
