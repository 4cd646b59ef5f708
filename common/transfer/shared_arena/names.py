"""What is known of media by name: which item a name stands for, and who is processing it.

For one event loop.
"""

from collections.abc import Callable, Hashable
from typing import Final

from blake3 import blake3

from common.identity import MmHash
from common.lru import Lru

HASHES_KEPT: Final = 100_000
"""Media whose hash is remembered; the one asked for longest ago goes first."""


def key_name(key: Hashable) -> bytes | None:
    """Return 32 bytes that are equal in all processes, as a key's hash is not; None for a key that
    is like no other in any process.
    """
    try:
        return blake3(_text(key).encode("utf-8", "surrogatepass")).digest()
    except TypeError:
        return None


def _text(value: object) -> str:
    # A set has no order that two processes share.
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(_text, value))) + "}"
    if isinstance(value, tuple):
        return "(" + ",".join(map(_text, value)) + ")"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    raise TypeError(f"{value!r} has no name")


class MediaNames:
    """Names for items in spaces of their own, of which each has a limit."""

    def __init__(self) -> None:
        self._spaces: dict[bytes, Lru[bytes, MmHash]] = {}

    def remember(self, space: bytes, name: bytes, mm_hash: MmHash, most: int) -> None:
        """A name stands for an item from now on; the one used longest ago may go."""
        self._spaces.setdefault(space, Lru(most)).put(name, mm_hash)

    def recall(self, space: bytes, name: bytes) -> MmHash | None:
        """What a name stands for."""
        names = self._spaces.get(space)
        return None if names is None else names.get(name)

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
