"""Which media each target's encoder has encoded lately, so that it won't encode them again. No I/O.

An engine keeps what its encoder made until it needs the room. It has little room: for as many
tokens as a step prefills. The last block that an item touches mostly holds text of the question
too, so a prompt whose picture is in the prefix cache has it encoded anew unless that is still
there. Of what other frontends send nothing is known.
Source: ``EncoderCacheManager`` of vLLM 0.32.0 and 0.33.0.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from common.identity import MmHash, Target
from frontend.router.request import MediaNeed

_MAX_ITEMS: Final = 4_096
"""Of one target: a card may claim room for any number of tokens, and all items are added up."""


class EncodedMedia:
    """For each target an LRU cache of as many items as its encoder cache has room for."""

    def __init__(self) -> None:
        self._room: dict[Target, int] = {}
        self._tokens: dict[Target, OrderedDict[MmHash, int]] = {}

    def add(self, target: Target, tokens: int) -> None:
        """Register a target.

        Args:
            tokens: that it has room for, 0 if unknown.
        """
        self._room[target] = tokens
        self._tokens[target] = OrderedDict()

    def drop(self, target: Target) -> None:
        """Forget a target that is gone. Unknown ones are ignored."""
        self._room.pop(target, None)
        self._tokens.pop(target, None)

    def emptied(self, target: Target) -> None:
        """Forget what a target keeps. Unknown ones are ignored."""
        if target in self._tokens:
            self._tokens[target].clear()

    def used(self, target: Target, media: Iterable[MediaNeed]) -> None:
        """Note that a prompt needs these from the encoder. Unknown targets are ignored."""
        if not self.knows(target):
            return
        items = self._tokens[target]
        for need in media:
            items[need.mm_hash] = need.num_tokens
            items.move_to_end(need.mm_hash)
        taken = sum(items.values())
        # One item always has room.
        while (taken > self._room[target] or len(items) > _MAX_ITEMS) and len(items) > 1:
            taken -= items.popitem(last=False)[1]

    def holds(self, target: Target, mm_hash: MmHash) -> bool:
        """Return whether a target need not encode an item again."""
        return mm_hash in self._tokens.get(target, ())

    def knows(self, target: Target) -> bool:
        """Return whether it is known how much room a target has."""
        return self._room.get(target, 0) > 0
