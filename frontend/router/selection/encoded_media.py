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

_MOST_ITEMS: Final = 65_536
"""Of one target: its card may say that it has room for any number of tokens."""


class _Kept:
    """What one target keeps, the item used longest ago first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.items: OrderedDict[MmHash, int] = OrderedDict()
        self._taken = 0

    def use(self, need: MediaNeed) -> None:
        self._taken += need.num_tokens - self.items.pop(need.mm_hash, 0)
        self.items[need.mm_hash] = need.num_tokens

    def make_room(self) -> None:
        # One item always has room.
        while (self._taken > self.room or len(self.items) > _MOST_ITEMS) and len(self.items) > 1:
            self._taken -= self.items.popitem(last=False)[1]


class EncodedMedia:
    """For each target, the items used last, as many as its engine has room for."""

    def __init__(self) -> None:
        self._targets: dict[Target, _Kept] = {}

    def add(self, target: Target, tokens: int) -> None:
        """Register a target.

        Args:
            tokens: that it has room for.
        """
        self._targets[target] = _Kept(tokens)

    def drop(self, target: Target) -> None:
        """It is gone. Unknown ones are ignored."""
        self._targets.pop(target, None)

    def emptied(self, target: Target) -> None:
        """It keeps nothing any more. Unknown ones are ignored."""
        if (kept := self._targets.get(target)) is not None:
            self._targets[target] = _Kept(kept.room)

    def used(self, target: Target, media: Iterable[MediaNeed]) -> None:
        """A prompt was sent that needs these from the encoder. Unknown targets are ignored."""
        if (kept := self._targets.get(target)) is None:
            return
        for need in media:
            kept.use(need)
        kept.make_room()

    def holds(self, target: Target, mm_hash: MmHash) -> bool:
        """Whether it need not encode an item again."""
        kept = self._targets.get(target)
        return kept is not None and mm_hash in kept.items

    def knows(self, target: Target) -> bool:
        """Whether anything can be said of a target: how much room it has."""
        kept = self._targets.get(target)
        return kept is not None and kept.room > 0
