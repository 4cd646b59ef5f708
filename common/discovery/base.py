"""The discovery interface: workers publish cards, frontends watch them.

A card is valid while its lease is renewed; the lease of a dead worker expires. The request plane
notices a dead worker sooner, and a worker that it reaches stays alive without a card: discovery
decides only who may be connected to.

A card belongs to one incarnation of a worker. Several may share a worker id: none replaces or
removes another's.
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

RENEW_S: Final = 1.0  # also a starting frontend's wait to learn which workers live
MAX_PROBLEMS: Final = 100  # logged while nothing succeeds: a server's texts may never be the same
WITHDRAW_S: Final = 5.0  # how long a leaving worker waits for a place that does not answer


class CardPresent(NamedTuple):
    """An incarnation of a worker appeared, or changed its card."""

    card: WorkerCard


class CardGone(NamedTuple):
    """The card of an incarnation was withdrawn or lost, or its lease ended."""

    worker_id: WorkerId
    incarnation: Incarnation


class CardRefused(NamedTuple):
    """The entry under an incarnation's name is not a usable card."""

    worker_id: WorkerId
    incarnation: Incarnation
    error: CardError


CardChange = CardPresent | CardGone | CardRefused


class CardPublisher(ABC):
    """Publish a worker's card and keep its lease. A renewal republishes a lost card."""

    @abstractmethod
    async def check(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Raise DiscoveryError if no card can be published, before an engine starts for minutes."""

    @abstractmethod
    async def publish(self, card: WorkerCard) -> None:
        """Publish the card, or replace the earlier one. Raises DiscoveryError."""

    @abstractmethod
    async def withdraw(self) -> None:
        """Remove only this publisher's card, for good. Failures are only logged."""

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
    """A frontend's view of the cards."""

    @abstractmethod
    def changes(self) -> AsyncIterator[CardChange]:
        """Yield all present cards, then every change, for ever.

        Unreadable cards are logged and counted once, then ignored. While nothing can be read,
        nothing changes. Cancelling leaves nothing behind; iterating again continues after the last
        change.

        Raises DiscoveryError: on the first read, cards are unreadable, or untrusted users could
        write them.
        """


class Discovery(ABC):
    """A place for cards. Construction has no side effects; ``str`` of it is for operators. ``form``
    is its URL as an operator has to write it."""

    form: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_url(cls, url: SplitResult) -> Self:
        """Open a URL's place. Raises ConfigurationError, whose message begins with the fault."""

    @abstractmethod
    def publisher(self, key: FleetKey | None = None, *, renew_s: float = RENEW_S) -> CardPublisher:
        """Return a publisher that seals cards with ``key`` and renews every ``renew_s`` seconds."""

    @abstractmethod
    def watcher(self, key: FleetKey | None = None) -> CardWatcher:
        """Return a watcher that refuses cards not sealed with ``key``."""


def options_of(url: SplitResult, known: Sequence[str]) -> dict[str, str]:
    """Return a URL's options. Raises ConfigurationError, ValueError: unknown, empty, duplicate."""
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
    """Publisher with a renewal task. Withdrawing does not wait for an unresponsive place."""

    place: ClassVar[str]

    def __init__(self, key: FleetKey | None, renew_s: float) -> None:
        self.key = key
        self._renew_s = renew_s
        self._tasks: list[asyncio.Task[None]] = []
        self.withdrawn = False

    @abstractmethod
    async def _renew(self) -> None:
        """Renew the lease, and republish a lost card. Raises OSError or DiscoveryError."""

    @abstractmethod
    async def _remove(self) -> None:
        """Remove the card. Raises OSError or DiscoveryError."""

    async def _close(self) -> None:
        """Close connections, however the withdrawal ended."""

    def keep_renewed(self, **others: Work) -> None:
        """Renew the lease from now on, and run the ``others`` meanwhile, by name."""
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
        """Keep renewing through all errors: an operator may free the disk or restore etcd."""
        said: set[str] = set()
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                await self._renew()
            except (OSError, DiscoveryError) as error:
                DISCOVERY_ERRORS.labels("renewal").inc()
                if str(error) not in said and len(said) < MAX_PROBLEMS:
                    said.add(str(error))
                    logger.warning("the lease of the card can't be renewed: %s", error)
            else:
                if said:
                    said.clear()
                    logger.info("the lease of the card is renewed again")
