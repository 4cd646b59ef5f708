"""What the processes of a frontend know together of media: whose name is what, who is at what.

For one event loop.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from common.aio.newest import keep_newest
from common.identity import MmHash

HASHES_KEPT: Final = 100_000
"""Media whose hash is remembered; the one asked for longest ago goes first."""


class Names:
    """Names for items in spaces of their own, of which each has a limit."""

    def __init__(self) -> None:
        self._spaces: dict[bytes, OrderedDict[bytes, MmHash]] = {}

    def remember(self, space: bytes, name: bytes, mm_hash: MmHash, most: int) -> None:
        """A name stands for an item from now on; the one used longest ago may go."""
        keep_newest(self._spaces.setdefault(space, OrderedDict()), name, mm_hash, most)

    def recall(self, space: bytes, name: bytes) -> MmHash | None:
        """What a name stands for."""
        names = self._spaces.get(space, OrderedDict())
        if name in names:
            names.move_to_end(name)
        return names.get(name)

    def clear(self) -> None:
        """Forget all names."""
        self._spaces.clear()


class Claims:
    """Which medium is being processed by whom, and who waits for it."""

    def __init__(self) -> None:
        self._owners: dict[bytes, object] = {}
        self._waiting: dict[bytes, list[Callable[[], None]]] = {}

    def take(self, key: bytes, owner: object, later: Callable[[], None]) -> bool:
        """Whether somebody is at it, from now on or already, since nobody else is.

        Args:
            later: called once that has changed, otherwise.
        """
        if self._owners.setdefault(key, owner) is owner:
            return True
        self._waiting.setdefault(key, []).append(later)
        return False

    def end(self, key: bytes, owner: object) -> None:
        """Whoever was at it no longer is. Nothing if that was somebody else."""
        if self._owners.get(key) is owner:
            del self._owners[key]
            for later in self._waiting.pop(key, []):
                later()

    def end_all(self, owner: object) -> None:
        """All that somebody was at."""
        for key in [key for key, each in self._owners.items() if each is owner]:
            self.end(key, owner)
