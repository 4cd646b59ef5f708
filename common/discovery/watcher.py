"""A frontend's side of discovery: one poll loop for a directory, etcd and Kubernetes.

A card is alive while its lease is renewed, which changes its version. The reader's own monotonic
clock measures the lease; clocks of two hosts are never compared. Where the place expires leases
itself, as etcd does, a card lives until it is removed.
"""

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple

from common.backoff import Backoff
from common.discovery.base import (
    MAX_PROBLEMS,
    CardChange,
    CardGone,
    CardPresent,
    CardRefused,
    CardWatcher,
)
from common.discovery.sealed_cards import unseal
from common.errors import CardError, CardKeyError, DiscoveryError
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import DISCOVERY_ERRORS
from common.request_plane.card import WorkerCard

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 5.0  # between tries while nothing can be read

MAX_CARDS: Final = 2048
"""A frontend has three open files for each worker, and tries those again that don't answer."""

MAX_CARD_BYTES_IN_ALL: Final = 64 << 20
NO_ROOM: Final = "there is no room for more cards"

MAX_ODD: Final = 100  # entries that are no cards and are remembered, each to be logged once
MAX_ODD_NAME: Final = 200  # remembered characters of a name: a key of etcd may have a megabyte

MAX_LISTED: Final = 1 << 20  # entries of a place: a listing of more may have no end

READ_AT_ONCE: Final = 16  # contents: a card may have a megabyte

_LISTED_AT_ONCE: Final = 500  # entries between turns of other tasks


class Odd(NamedTuple):
    """Reason why an entry is not a card: a label for counters, and a sentence."""

    reason: str
    what: str


class Entry(NamedTuple):
    """An entry of a place.

    Attributes:
        version: changes with every write and every renewal.
        whose: the worker and incarnation in the name, or why it is not a card.
        size: bytes of its content, 0 if unknown.
        content: None until :meth:`Place.read`.
    """

    name: str
    version: Hashable
    whose: tuple[WorkerId, Incarnation] | Odd
    size: int = 0
    content: bytes | None = None


class Place(ABC):
    """A place with cards; ``str`` of it is for operators. All methods may raise DiscoveryError.

    Attributes:
        poll_s: seconds between polls.
        lease_s: lifetime of a card that is not renewed; None if the place expires it.
    """

    poll_s: float
    lease_s: float | None = None

    @abstractmethod
    def pages(self) -> AsyncGenerator[Iterable[Entry], None]:
        """Yield all entries."""

    async def read(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the entries with their contents, without those that are gone by now."""
        return entries

    async def close(self) -> None:  # noqa: B027  # a directory has none
        """Close connections."""


@dataclass
class _Known:
    """State of one incarnation's card.

    Attributes:
        unrenewed_s: infinite before a change was seen, as the worker may be long dead.
        content: last content read, valid or not.
        card: last card reported; None after its end.
        told: a reported change has not been followed by its end.
        renews: whether the last content renews the lease of the reported card.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    version: Hashable = None
    unrenewed_s: float = 0.0
    size: int = 0
    content: bytes | None = None
    card: WorkerCard | None = None
    told: bool = False
    renews: bool = False

    def look(self, content: bytes, key: FleetKey | None, *, alive: bool) -> CardChange | None:
        """Take the content; return the change to report, if the worker is known to live."""
        if content == self.content and self.told:
            return None
        another, self.content = content != self.content, content
        try:
            card = unseal(content, key)
            if (card.worker_id, card.incarnation) != (self.worker_id, self.incarnation):
                raise CardError(
                    f"it names worker {card.worker_id!r}, incarnation {card.incarnation!r}"
                )
        except CardError as error:
            if another:
                logger.warning("card %s.%s ignored: %s", self.worker_id, self.incarnation, error)
                if not isinstance(error, CardKeyError):
                    DISCOVERY_ERRORS.labels("malformed").inc()
            self.renews = alive and self.card is None  # a card that we know keeps its own lease
            if not self.renews:
                return None
            self.told = True
            return CardRefused(self.worker_id, self.incarnation, error)
        self.renews = alive
        if not alive or card == self.card:
            return None
        self.card, self.told = card, True
        return CardPresent(card)

    def end(self) -> CardGone | None:
        """End the card; return None if it was never reported."""
        if not self.told:
            return None
        self.card, self.told = None, False
        return CardGone(self.worker_id, self.incarnation)


class PollingWatcher(CardWatcher):
    """Polls a place."""

    def __init__(
        self, place: Place, key: FleetKey | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Refuse cards that aren't sealed with the fleet's key; ``clock`` is monotonic."""
        self._place = place
        self._key = key
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._bytes = 0
        self._odd: dict[str, str] = {}
        self._full = False
        self._has_read = False
        self._looked_at = -math.inf
        self._pending: deque[CardChange] = deque()
        self._problems: set[str] = set()

    async def changes(self) -> AsyncIterator[CardChange]:
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        try:
            while True:
                try:
                    await self._look()
                except DiscoveryError as error:
                    if not self._has_read:
                        raise DiscoveryError(f"no cards can be read: {error}") from error
                    self._note_problem(error)
                    pause = backoff.next_s()
                else:
                    backoff.reset()
                    if self._problems:
                        self._problems.clear()
                        logger.info("discovery is available again")
                    pause = self._place.poll_s
                while self._pending:
                    yield self._pending.popleft()
                await asyncio.sleep(pause)
        finally:
            await self._place.close()

    async def _look(self) -> None:
        now = self._clock()
        # Leases stand still while nothing can be read, or while the reader was suspended.
        passed = min(now - self._looked_at, 4 * self._place.poll_s)
        self._looked_at = now
        there, odd = set[str](), dict[str, str]()
        async with aclosing(self._place.pages()) as pages:
            full = await self._look_through(pages, there, odd, passed)
        self._forget_all_but(there)
        self._odd, self._has_read = odd, True
        if full and not self._full:
            DISCOVERY_ERRORS.labels("size").inc()
            logger.warning("cards in %s are skipped: %s", self._place, NO_ROOM)
        self._full = full

    async def _look_through(
        self,
        pages: AsyncIterator[Iterable[Entry]],
        there: set[str],
        odd: dict[str, str],
        passed: float,
    ) -> bool:
        """Read what is new on all pages; return whether there was no room for one."""
        full, listed = False, 0
        async for page in pages:
            wanted = list[Entry]()
            listed += 1  # a page without entries may come again and again too
            if listed > MAX_LISTED:
                raise DiscoveryError(f"{self._place} lists more than {MAX_LISTED} entries")
            for entry in page:
                listed += 1
                if listed % _LISTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                known = self._known.get(entry.name)
                if known is not None:
                    there.add(entry.name)
                    known.unrenewed_s += passed
                if isinstance(entry.whose, Odd):
                    self._skip(entry.name, entry.whose, odd)
                elif known is None and not self._has_room(entry.name, entry.size):
                    full = True
                elif known is None or entry.version != known.version:
                    wanted.append(entry)
                    if len(wanted) == READ_AT_ONCE:
                        full |= await self._read(wanted, there, odd)
                        wanted = []
            full |= await self._read(wanted, there, odd)
        return full

    async def _read(self, wanted: Sequence[Entry], there: set[str], odd: dict[str, str]) -> bool:
        """Read and store entries; return whether there was no room for one."""
        full = False
        for entry in await self._place.read(wanted) if wanted else ():
            if isinstance(entry.whose, Odd):
                self._skip(entry.name, entry.whose, odd)
            elif not self._take(entry):
                full = True
            else:
                there.add(entry.name)
            await asyncio.sleep(0)  # a large card takes up to 0.1 s
        return full

    def _take(self, entry: Entry) -> bool:
        """Store an entry; return False if there is no room for it."""
        content = entry.content or b""
        known = self._known.get(entry.name)
        if not self._has_room(entry.name, len(content)):
            if known is not None:
                known.version = entry.version  # not to be read again and again
            return False
        alive = known is not None or self._has_read or self._place.lease_s is None
        if known is None:
            assert not isinstance(entry.whose, Odd)
            known = self._known[entry.name] = _Known(*entry.whose)
            known.unrenewed_s = 0.0 if alive else math.inf
        self._bytes += len(content) - known.size
        known.version, known.size = entry.version, len(content)
        self._tell(known.look(content, self._key, alive=alive))
        if known.renews:
            known.unrenewed_s = 0.0
        return True

    def _has_room(self, name: str, size: int) -> bool:
        known = self._known.get(name)
        if known is None:
            known_size, fits = 0, len(self._known) < MAX_CARDS
        else:
            known_size, fits = known.size, True
        return fits and self._bytes + size - known_size <= MAX_CARD_BYTES_IN_ALL

    def _forget_all_but(self, there: set[str]) -> None:
        for name in [name for name in self._known if name not in there]:
            known = self._known.pop(name)
            self._bytes -= known.size
            self._tell(known.end())
        if self._place.lease_s is not None:
            for known in self._known.values():
                if known.unrenewed_s > self._place.lease_s:
                    self._tell(known.end())

    def _tell(self, change: CardChange | None) -> None:
        if change is not None:
            self._pending.append(change)

    def _skip(self, name: str, why: Odd, odd: dict[str, str]) -> None:
        if len(odd) >= MAX_ODD:
            return
        name = name[:MAX_ODD_NAME]
        odd[name] = why.what
        if self._odd.get(name) != why.what:
            self._odd[name] = why.what  # also if this look comes to nothing
            DISCOVERY_ERRORS.labels(why.reason).inc()
            logger.warning("%r in %s is skipped: %s", name, self._place, why.what)

    def _note_problem(self, error: DiscoveryError) -> None:
        DISCOVERY_ERRORS.labels("listing").inc()
        if str(error) not in self._problems and len(self._problems) < MAX_PROBLEMS:
            self._problems.add(str(error))
            logger.error("discovery unavailable (%s); keeping the last known workers", error)
