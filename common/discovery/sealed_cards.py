"""Serialized cards, with a MAC if there is a fleet key.

A sealed card is its JSON with a last member ``"mac"``: HMAC-SHA256 over the JSON without it, under
a secret derived from the fleet key. It covers worker id and incarnation; the lease says whether the
worker lives.
"""

import hmac
import re
from typing import Final

from common.errors import CardKeyError, DiscoveryError
from common.fleet_key import FleetKey
from common.request_plane.card import CARD_LIMITS, WorkerCard
from common.request_plane.fleet_sockets import check_card

MAX_UNSEALED: Final = 1 << 14
"""Bytes of a card that is parsed without its MAC, to say whose it is: larger ones take 50 ms, and
strangers may change them again and again."""

_DOMAIN: Final = b"mmrouter card\0"
_MAC: Final = re.compile(rb',"mac":"([0-9a-f]{64})"\}\Z')


def seal(card: WorkerCard, key: FleetKey | None) -> bytes:
    """Serialize a card, with a MAC if there is a key. Raises DiscoveryError: too large."""
    content = card.to_json()
    if len(content) > CARD_LIMITS.most_bytes:
        raise DiscoveryError(
            f"the card has {len(content)} bytes, and frontends take {CARD_LIMITS.most_bytes}"
        )
    if key is None:
        return content
    return content[:-1] + b',"mac":"' + _mac(content, key).encode() + b'"}'


def unseal(data: bytes, key: FleetKey | None) -> WorkerCard:
    """Parse a card, which needs a MAC if there is a key. Raises CardError: it is malformed. Raises
    CardKeyError: its author does not have the key."""
    found = _MAC.search(data)
    content = data if found is None else data[: found.start()] + b"}"
    if key is None or (
        found is not None and hmac.compare_digest(found[1], _mac(content, key).encode())
    ):
        return WorkerCard.from_json(content)
    worker = "a worker"
    if len(content) <= MAX_UNSEALED:
        card = WorkerCard.from_json(content)
        check_card(card, key)  # names both keys if the card names another one
        worker = f"worker {card.worker_id}"
    raise CardKeyError(
        f"{worker} refused: its card "
        + ("has no MAC" if found is None else "has a MAC that is not")
        + " of this fleet's key, so anybody could have written it; start workers and "
        "frontends with the same --fleet-key-file"
    )


def _mac(content: bytes, key: FleetKey) -> str:
    return hmac.digest(key.cards, _DOMAIN + content, "sha256").hex()
