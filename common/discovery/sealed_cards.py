"""Cards as bytes, sealed by who has the fleet key; and what a watcher knows of one card.

A sealed card is its JSON with one more member at the end, ``"mac"``: HMAC-SHA256 over the
JSON without it, under a secret derived from the fleet key. It covers worker id and
incarnation; whether the worker still lives is the lease's business, not the seal's.
"""

import hmac
import logging
import re
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Final

from common.discovery.base import CardChange, CardGone, CardPresent, CardRefused
from common.errors import CardError, CardKeyError, DiscoveryError
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import DISCOVERY_ERRORS
from common.request_plane.card import CARD_LIMITS, WorkerCard
from common.request_plane.fleet_sockets import check_card

logger = logging.getLogger(__name__)

_DOMAIN: Final = b"mmrouter card\0"
_MAC: Final = re.compile(rb',"mac":"([0-9a-f]{64})"\}\Z')


def seal(card: WorkerCard, key: FleetKey | None) -> bytes:
    """Serialise a card, with a MAC if there is a key.

    Raises DiscoveryError: no frontend would take it.
    """
    content = card.to_json()
    if len(content) > CARD_LIMITS.most_bytes:
        raise DiscoveryError(
            f"the card has {len(content)} bytes, and frontends take {CARD_LIMITS.most_bytes}"
        )
    if key is None:
        return content
    return content[:-1] + b',"mac":"' + _mac(content, key).encode() + b'"}'


def unseal(data: bytes, key: FleetKey | None) -> WorkerCard:
    """Parse a card, which has to have a MAC if there is a key.

    Raises:
        CardError: it is malformed.
        CardKeyError: it isn't from somebody who has the key.
    """
    found = _MAC.search(data)
    content = data if found is None else data[: found.start()] + b"}"
    card = WorkerCard.from_json(content)
    if key is None:
        return card
    if found is None or not hmac.compare_digest(found[1], _mac(content, key).encode()):
        check_card(card, key)  # which names both keys if the worker says that it has another
        raise CardKeyError(
            f"worker {card.worker_id} refused: its card "
            + ("has no MAC" if found is None else "has a MAC that is not")
            + " of this fleet's key, so anybody could have written it; start workers and "
            "frontends with the same --fleet-key-file"
        )
    return card


def _mac(content: bytes, key: FleetKey) -> str:
    return hmac.digest(key.cards, _DOMAIN + content, "sha256").hex()


MAX_CARDS: Final = 2048
"""A frontend has three open files for each worker, and tries those again that don't answer."""

MAX_CARD_BYTES_IN_ALL: Final = 64 << 20
NO_ROOM: Final = "there is no room for more cards"


class CardRoom:
    """Bounds what a watcher remembers of cards, usable or not, by their names.

    Attributes:
        left_out: whether some card found no room that may find some by now.
    """

    def __init__(self) -> None:
        self._sizes: dict[Hashable, int] = {}
        self._bytes = 0
        self.left_out = False

    @property
    def is_full(self) -> bool:
        return len(self._sizes) >= MAX_CARDS

    def take(self, name: Hashable, size: int) -> bool:
        """Say whether there is room for a card, or for the card that now stands under its name."""
        grown = self._bytes + size - self._sizes.get(name, 0)
        if grown > MAX_CARD_BYTES_IN_ALL or (self.is_full and name not in self._sizes):
            self.left_out = True
            return False
        self._sizes[name], self._bytes = size, grown
        return True

    def give_back(self, name: Hashable) -> None:
        self._bytes -= self._sizes.pop(name, 0)

    def keep_only(self, names: Collection[Hashable]) -> None:
        for name in self._sizes.keys() - set(names):
            self.give_back(name)

    def is_worth_a_look(self) -> bool:
        """Say, once, whether cards that found no room may find some: a quarter of it is free."""
        free = 4 * len(self._sizes) < 3 * MAX_CARDS and 4 * self._bytes < 3 * MAX_CARD_BYTES_IN_ALL
        worth, self.left_out = self.left_out and free, self.left_out and not free
        return worth


@dataclass
class KnownCard:
    """The card of one incarnation of a worker, both named as the place has it.

    Attributes:
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
        """Take what lies there now. Nothing is told before its worker is known to live.

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
                    DISCOVERY_ERRORS.labels("malformed").inc()
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
