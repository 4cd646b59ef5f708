"""What a watcher knows of one card, whatever the place is in which cards lie."""

import logging
from dataclasses import dataclass

from common.discovery.base import CardChange, CardGone, CardPresent, CardRefused
from common.discovery.seal import unseal
from common.errors import CardError, CardKeyError
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import MALFORMED_CARDS
from common.request_plane.card import WorkerCard

logger = logging.getLogger(__name__)


@dataclass
class KnownCard:
    """The card of one incarnation of a worker.

    Attributes:
        worker_id: as the place names it.
        incarnation: likewise.
        content: what was read last, whether it is a card or not.
        card: the last card that was told of; None after its end.
        told: whether anything was told of it that has not ended.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    content: bytes | None = None
    card: WorkerCard | None = None
    told: bool = False

    def look(
        self, content: bytes, key: FleetKey | None, *, alive: bool = True
    ) -> tuple[bool, CardChange | None]:
        """Take what lies there now.

        Args:
            key: of the fleet; a card that isn't sealed with it is refused.
            alive: whether its worker is known to live. Nothing is told before.

        Returns:
            Whether that renews the lease of what was told, and the change to tell.
        """
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
                    MALFORMED_CARDS.inc()
            if not alive or self.card is not None:  # the card that we know stays, under its lease
                return False, None
            if self.told and not another:
                return True, None
            self.told = True
            return True, CardRefused(self.worker_id, self.incarnation, error)
        if not alive:
            return False, None
        if card == self.card:
            return True, None
        self.card, self.told = card, True
        return True, CardPresent(card)

    def end(self) -> CardGone | None:
        """It is gone, or its lease is over; None if nobody was told of it."""
        if not self.told:
            return None
        self.card, self.told = None, False
        return CardGone(self.worker_id, self.incarnation)
