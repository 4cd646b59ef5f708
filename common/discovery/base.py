"""The discovery interface: workers publish cards, frontends watch them.

A card stays valid for as long as its lease is renewed; a worker that dies without
saying so disappears when the lease ends. The request plane notices a dead worker
sooner; discovery decides who may be connected to at all.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType
from typing import NamedTuple, Self

from common.card import WorkerCard
from common.identity import WorkerId


class CardPresent(NamedTuple):
    """A worker appeared, restarted in place, or changed its card."""

    card: WorkerCard


class CardGone(NamedTuple):
    """A worker withdrew its card, or the lease ended."""

    worker_id: WorkerId


CardChange = CardPresent | CardGone


class CardPublisher(ABC):
    """A worker's side: publishes one card and renews its lease in the background."""

    @abstractmethod
    async def publish(self, card: WorkerCard) -> None:
        """Publish or replace the card.

        Raises:
            DiscoveryError: the card can't be published here.
        """

    @abstractmethod
    async def withdraw(self) -> None:
        """Remove the card now. Never raises for a card that is already gone."""

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

        A malformed card is logged and counted once, and otherwise ignored.
        Cancelling the iteration leaves nothing behind.

        Raises:
            DiscoveryError: strangers could have written the cards.
        """
