"""Which media each target's encoder has encoded lately, so that it won't encode them again. No I/O.

An engine keeps what its encoder made until it needs the room. It has little room: for as many
tokens as a step prefills. The last block that an item touches mostly holds text of the question
too, so a prompt whose picture is in the prefix cache has it encoded anew unless that is still
there. Of what other frontends send nothing is known.
Source: ``EncoderCacheManager`` of vLLM 0.32.0 and 0.33.0.
"""

from collections.abc import Iterable
from typing import Final

from common.identity import MmHash, Target
from common.lru import Lru
from frontend.router.request import MediaNeed

_MAX_ITEMS: Final = 4_096
"""Of one target, since a card may claim room for any number of tokens: an item takes this share of
the room or more."""


class EncodedMedia:
    """For each target an LRU cache of as many items as its encoder cache has room for."""

    def __init__(self) -> None:
        self._items: dict[Target, Lru[MmHash, int]] = {}

    def add(self, target: Target, tokens: int) -> None:
        """Register a target.

        Args:
            tokens: that it has room for, 0 if unknown.
        """
        least = max(1, tokens // _MAX_ITEMS)
        if tokens > 0:  # one item always has room
            self._items[target] = Lru(tokens, lambda taken: min(max(taken, least), tokens))
        else:
            self._items.pop(target, None)

    def drop(self, target: Target) -> None:
        """Forget a target that is gone. Unknown ones are ignored."""
        self._items.pop(target, None)

    def emptied(self, target: Target) -> None:
        """Forget what a target keeps. Unknown ones are ignored."""
        if target in self._items:
            self._items[target].clear()

    def used(self, target: Target, media: Iterable[MediaNeed]) -> None:
        """Note that a prompt needs these from the encoder. Unknown targets are ignored."""
        if (items := self._items.get(target)) is not None:
            for need in media:
                items.put(need.mm_hash, need.num_tokens)

    def holds(self, target: Target, mm_hash: MmHash) -> bool:
        """Return whether a target need not encode an item again."""
        return mm_hash in self._items.get(target, ())

    def knows(self, target: Target) -> bool:
        """Return whether it is known how much room a target has."""
        return target in self._items
