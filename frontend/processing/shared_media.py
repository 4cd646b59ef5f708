"""What the other processes of this frontend have processed, or are at: each medium is processed by
one of them.
"""

from collections.abc import Hashable

from blake3 import blake3

from common.identity import MmHash
from common.transfer.shared_arena import MediaDirectory
from frontend.processing.batch import Processed
from frontend.processing.store import ArenaStore


class SharedMedia:
    """Asks them before a medium is processed. For one event loop."""

    def __init__(self, directory: MediaDirectory, store: ArenaStore) -> None:
        """
        Args:
            store: over the arena of the directory.
        """
        self._directory = directory
        self._store = store

    async def claim(self, key: Hashable) -> Processed | None:
        """A medium that is kept, or None if it is to be processed here: then :meth:`landed` must
        follow. Waits for the process that is at it.

        Who claims several does so in the order of :meth:`order`, or two could wait for each other.
        """
        name = _name(key)
        lease = None if name is None else await self._directory.claim(name)
        return None if lease is None else self._store.view(lease)

    def landed(self, key: Hashable, mm_hash: MmHash | None) -> None:
        """A medium was processed here.

        Args:
            mm_hash: its hash; None if nothing came of it.
        """
        name = _name(key)
        if name is not None:
            self._directory.landed(name, mm_hash)

    @staticmethod
    def order(key: Hashable) -> bytes:
        """Equal in all processes."""
        return _name(key) or b""


def _name(key: Hashable) -> bytes | None:
    """A key's name for all processes, None for a key that is like no other."""
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
