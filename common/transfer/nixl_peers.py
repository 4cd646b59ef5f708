"""Frontends that a worker reads from over NIXL: connected, kept when they leave, and mended."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeVar

from common.errors import ArenaUnavailableError, TransferError, TransferTimeoutError
from common.transfer.nixl_agent import NixlOffer
from common.transfer.nixl_reader import NixlReader
from common.transfer.nixl_thread import Steps

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

MAX_OVERDUE: Final = 4
"""So many reads from one frontend may be overdue at once; then it is left alone, since none
of their buffers can be used until the bytes came or the connection broke."""

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0


class _Left(NamedTuple):
    """A frontend whose connection is kept, until the frontend or, if the connection is broken,
    the last read over it has ended.
    """

    offer: NixlOffer
    broken: bool
    watch: "asyncio.Task[None]"


class NixlPeers:
    """Keeps the connections of a worker, and ends its reads in time.

    Attributes:
        deadline: seconds that a read may take.
    """

    def __init__(self, reader: NixlReader, deadline: float) -> None:
        self.deadline = deadline
        self._reader = reader
        self._offers: dict[str, NixlOffer] = {}
        self._left: dict[str, _Left] = {}
        self._mending: dict[str, asyncio.Task[None]] = {}
        self._attaching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reading: Counter[str] = Counter()
        self._overdue: Counter[str] = Counter()

    def offer(self, agent: str) -> NixlOffer:
        """That of a frontend which can be read from.

        Raises:
            ArenaUnavailableError: it isn't connected, or doesn't answer.
        """
        offer = self._offers.get(agent)
        if offer is None:
            raise ArenaUnavailableError(f"{agent} isn't connected here")
        if self._overdue[agent] >= MAX_OVERDUE:
            raise ArenaUnavailableError(f"{agent} doesn't answer: {MAX_OVERDUE} reads are overdue")
        return offer

    async def attach(self, offer: NixlOffer) -> None:
        """Connect to a frontend and prove it by reading the arena's probe.

        Raises:
            ArenaUnavailableError: it can't be reached, or the probe is wrong.
            TransferTimeoutError: it doesn't answer within the deadline.
        """
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
        """Let go of a frontend that left, or can't be reached for a while; items received from
        it stay usable.
        """
        self._stop_mending(agent)
        self._let_go(agent, broken=False)

    def broke(self, offer: NixlOffer) -> None:
        """A read ended with an error: make a new connection."""
        agent = offer.agent
        if self._offers.get(agent) is offer:  # the first that notices
            self._stop_mending(agent)
            self._let_go(agent, broken=True)
            self._mending[agent] = asyncio.create_task(self._mend(offer), name=f"mend-{agent}")

    def close(self) -> None:
        """Let go of all. Reads under way go on."""
        self._offers.clear()
        for left in self._left.values():
            left.watch.cancel()
        for mending in self._mending.values():
            mending.cancel()

    async def within_deadline(
        self,
        agent: str,
        steps: Steps[_Result],
        discard: Callable[[_Result], None] = lambda _: None,
    ) -> _Result:
        """What some steps of the reader give.

        Args:
            agent: whom they read from.
            discard: gets the result if nobody waits for it any more.

        Raises:
            TransferTimeoutError: they go on, and hold their buffer, but nobody waits for them.
        """
        ended = overdue = False
        self._reading[agent] += 1

        def finished() -> None:
            nonlocal ended
            ended = True
            self._reading[agent] -= 1
            if overdue:
                self._overdue[agent] -= 1

        try:
            async with asyncio.timeout(self.deadline):
                return await self._reader.thread.run_async(
                    steps, discard=discard, finished=finished
                )
        except TimeoutError as error:
            if not ended:
                overdue = True
                self._overdue[agent] += 1
            raise TransferTimeoutError(
                f"{agent} could not be read over NIXL within {self.deadline} s"
            ) from error

    def _let_go(self, agent: str, *, broken: bool) -> None:
        offer = self._offers.pop(agent, None)
        if offer is not None:
            watch = asyncio.create_task(self._forget_once_gone(offer), name=f"forget-{agent}")
            self._left[agent] = _Left(offer, broken, watch)

    async def _mend(self, offer: NixlOffer) -> None:
        """Connect again after a connection broke, which NIXL doesn't do by itself.

        Meanwhile items are refused, so they come inline.
        """
        logger.warning("the NIXL connection to %s broke: making a new one", offer.agent)
        for pause in _pauses():
            await asyncio.sleep(pause)
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
        """Disconnect from a frontend that left once it has ended, and not before.

        NIXL doesn't close its connection to a peer that lives: each frontend that is lost and
        found again, after a pause for instance, would cost a socket at both ends.
        """
        for pause in _pauses():
            if not await self._lives(offer):
                break
            await asyncio.sleep(pause)
        self._forget(offer.agent)

    async def _lives(self, offer: NixlOffer) -> bool:
        """Whether a frontend can be read from. Says yes while that isn't known."""
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
        """Disconnect from a frontend that nothing is read from."""
        del self._left[agent], self._reading[agent], self._overdue[agent]
        self._disconnect(agent)

    def _disconnect(self, agent: str) -> None:
        self._reader.thread.start(self._reader.disconnect(agent))


def _pauses() -> Iterator[float]:
    """Seconds between looks whether a frontend that left has ended, and between attempts to reach
    one whose connection broke: ever longer.
    """
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(pause * 2, _LONGEST_PAUSE)
