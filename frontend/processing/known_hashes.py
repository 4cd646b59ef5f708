"""Which hash a medium had when it was processed, so that a repeat needs no decoding."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from common.identity import MmHash

HASHES_KEPT: Final = 100_000
"""Media whose hash is remembered; the one asked for longest ago goes first."""


class KnownHashes:
    """Hashes by what makes media alike before they are decoded. For one event loop."""

    def __init__(self, most: int = HASHES_KEPT) -> None:
        """
        Args:
            most: hashes remembered.
        """
        self._most = most
        self._hashes: OrderedDict[Hashable, MmHash] = OrderedDict()

    def recall(self, key: Hashable) -> MmHash | None:
        """The hash that a medium had, if that is remembered."""
        mm_hash = self._hashes.get(key)
        if mm_hash is not None:
            self._hashes.move_to_end(key)
        return mm_hash

    def remember(self, key: Hashable, mm_hash: MmHash) -> None:
        """A medium was processed and has this hash."""
        self._hashes[key] = mm_hash
        if len(self._hashes) > self._most:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        """Forget all hashes."""
        self._hashes.clear()
