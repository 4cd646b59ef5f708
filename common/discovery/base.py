"""The discovery interface: workers publish cards, frontends watch them.

A card stays valid for as long as its lease is renewed; a worker that dies without
saying so disappears when the lease ends. The request plane notices a dead worker
sooner, and a worker that it reaches lives whatever became of its card; discovery decides
who may be connected to at all.

A card belongs to one incarnation of a worker. Several under one worker id are told apart:
none replaces or removes another's.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import ClassVar, Final, NamedTuple, Self
from urllib.parse import SplitResult, parse_qsl

from common.aio.supervised import Work, stop_tasks, supervise
from common.errors import CardError, ConfigurationError, DiscoveryError
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import DISCOVERY_ERRORS
from common.request_plane.card import WorkerCard

logger = logging.getLogger(__name__)

RENEW_S: Final = 1.0  # also how long a frontend waits, when it starts, to see which workers live
WITHDRAW_S: Final = 5.0  # how long a leaving worker waits for a place that does not answer


class CardPresent(NamedTuple):
    """An incarnation of a worker appeared, or changed its card."""

    card: WorkerCard


class CardGone(NamedTuple):
    """The card of an incarnation was withdrawn or got lost, or its lease ended."""

    worker_id: WorkerId
    incarnation: Incarnation


class CardRefused(NamedTuple):
    """What lies there under the name of an incarnation is no card that can be used."""

    worker_id: WorkerId
    incarnation: Incarnation
    error: CardError


CardChange = CardPresent | CardGone | CardRefused


class CardPublisher(ABC):
    """A worker's side: publishes one card and renews its lease in the background.

    A card that gets lost is published again by the next renewal.
    """

    @abstractmethod
    async def check(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Try whether a card of that name could be published: an engine takes minutes to start.

        Raises DiscoveryError: it can't.
        """

    @abstractmethod
    async def publish(self, card: WorkerCard) -> None:
        """Publish the card, or replace what this publisher published before.

        Raises DiscoveryError: the card can't be published here.
        """

    @abstractmethod
    async def withdraw(self) -> None:
        """Remove this publisher's card for good, and no other. Trouble is only logged."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.withdraw()


class CardWatcher(ABC):
    """A frontend's side."""

    @abstractmethod
    def changes(self) -> AsyncIterator[CardChange]:
        """All present cards, then every change, for ever.

        What can't be read is logged and counted once, and otherwise ignored; while nothing can be
        read, nothing changes. Cancelling the iteration leaves nothing behind, and iterating again
        goes on after the last change that was given.

        Raises DiscoveryError: at first sight, cards can't be read here, or strangers could write
        them.
        """


class Discovery(ABC):
    """A place where cards are kept. Making one touches nothing. ``str`` of it is for operators.

    Attributes:
        form: its URL as an operator has to write it.
    """

    form: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_url(cls, url: SplitResult) -> Self:
        """The place that a URL of this scheme names.

        Raises ConfigurationError: it names none; the message begins with what is wrong with it.
        """

    @abstractmethod
    def publisher(self, key: FleetKey | None = None, *, renew_s: float = RENEW_S) -> CardPublisher:
        """
        Args:
            key: seals the card; None in fleets without one.
            renew_s: seconds between renewals of the lease.
        """

    @abstractmethod
    def watcher(self, key: FleetKey | None = None) -> CardWatcher:
        """
        Args:
            key: of the fleet; cards that aren't sealed with it are refused.
        """


def options_of(url: SplitResult, known: Sequence[str]) -> dict[str, str]:
    """Return what stands behind the ``?`` of a URL.

    Raises ConfigurationError or ValueError: an option is unknown, empty or there twice.
    """
    given = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
    options = dict(given)
    if len(options) < len(given):
        raise ConfigurationError("it has an option twice")
    for name, value in options.items():
        if name not in known:
            raise ConfigurationError(f"it has no option {name!r}, only {', '.join(known)}")
        if not value or "\0" in value:
            raise ConfigurationError(f"its option {name!r} is empty or no text")
    return options


class RenewedPublisher(CardPublisher):
    """What publishers share: a lease that is renewed in a task, and a card withdrawn in time,
    though the place may not answer."""

    place: ClassVar[str]

    def __init__(self, key: FleetKey | None, renew_s: float) -> None:
        self.key = key
        self._renew_s = renew_s
        self._tasks: list[asyncio.Task[None]] = []
        self.withdrawn = False

    @abstractmethod
    async def _renew(self) -> None:
        """Renew the lease, and publish the card again if it was lost. May raise an OSError or a
        DiscoveryError."""

    @abstractmethod
    async def _remove(self) -> None:
        """Remove the card. Raises as above."""

    async def _close(self) -> None:
        """Let go of connections, however withdrawing ended."""

    def keep_renewed(self, **others: Work) -> None:
        """Renew the lease from now on, and run what else goes on meanwhile, by its name."""
        if self._tasks or self.withdrawn:
            return
        self._tasks = [
            asyncio.create_task(supervise(f"card {name}", work), name=f"card-{name}")
            for name, work in {"renewal": self._keep_renewing, **others}.items()
        ]

    async def withdraw(self) -> None:
        self.withdrawn = True
        try:
            await stop_tasks(self._tasks)
            async with asyncio.timeout(WITHDRAW_S):
                await self._remove()
        except (OSError, DiscoveryError) as error:  # a TimeoutError is an OSError
            logger.warning(
                "the card can't be withdrawn, its lease will end: %s",
                str(error) or f"{self.place} does not answer",
            )
        finally:
            await self._close()

    async def _keep_renewing(self) -> None:
        """Whatever goes wrong: the disk may be full or etcd gone, and the operator may put that
        right."""
        said: set[str] = set()
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                await self._renew()
            except (OSError, DiscoveryError) as error:
                DISCOVERY_ERRORS.labels("renewal").inc()
                if str(error) not in said:
                    said.add(str(error))
                    logger.warning("the lease of the card can't be renewed: %s", error)
            else:
                said.clear()
