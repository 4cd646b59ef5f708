"""Which media each target's encoder has encoded lately, so that it won't encode them again. No I/O.

An engine keeps what its encoder made until it needs the room. It has little room: for as many
tokens as a step prefills. The last block that an item touches mostly holds text of the question
too, so a prompt whose picture is in the prefix cache has it encoded anew unless that is still
there. Of what other frontends send nothing is known.
Source: ``EncoderCacheManager`` of vLLM 0.32.0.
"""

from collections import OrderedDict
from collections.abc import Iterable

from common.identity import MmHash, Target
from frontend.router.request import MediaNeed


class EncodedMedia:
    """For each target, the items used last, as many as its engine has room for."""

    def __init__(self) -> None:
        self._targets: dict[Target, tuple[int, OrderedDict[MmHash, int]]] = {}

    def add(self, target: Target, tokens: int) -> None:
        """Register a target.

        Args:
            tokens: that it has room for.
        """
        self._targets[target] = tokens, OrderedDict()

    def drop(self, target: Target) -> None:
        """It is gone. Unknown ones are ignored."""
        self._targets.pop(target, None)

    def emptied(self, target: Target) -> None:
        """It keeps nothing any more. Unknown ones are ignored."""
        if (found := self._targets.get(target)) is not None:
            found[1].clear()

    def used(self, target: Target, media: Iterable[MediaNeed]) -> None:
        """A prompt was sent that needs these from the encoder. Unknown targets are ignored."""
        room, items = self._targets.get(target, (0, OrderedDict[MmHash, int]()))
        for need in media:
            items.pop(need.mm_hash, None)
            items[need.mm_hash] = need.num_tokens
        taken = sum(items.values())
        while taken > room and len(items) > 1:  # one item always has room
            taken -= items.popitem(last=False)[1]

    def holds(self, target: Target, mm_hash: MmHash) -> bool:
        """Whether it need not encode an item again."""
        found = self._targets.get(target)
        return found is not None and mm_hash in found[1]

    def knows(self, target: Target) -> bool:
        """Whether anything can be said of a target: how much room it has."""
        found = self._targets.get(target)
        return found is not None and found[0] > 0
