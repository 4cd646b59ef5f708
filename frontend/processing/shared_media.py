"""What the other processes of this frontend have processed, or are at: each medium is processed by
one of them.
"""

from collections.abc import Hashable

from common.identity import MmHash
from common.transfer.shared_arena import MediaDirectory
from frontend.processing.batch import Processed
from frontend.processing.key_name import key_name
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
        name = key_name(key)
        lease = None if name is None else await self._directory.claim(name)
        return None if lease is None else self._store.view(lease)

    def landed(self, key: Hashable, mm_hash: MmHash | None) -> None:
        """A medium was processed here.

        Args:
            mm_hash: its hash; None if nothing came of it.
        """
        name = key_name(key)
        if name is not None:
            self._directory.landed(name, mm_hash)

    @staticmethod
    def order(key: Hashable) -> bytes:
        """Equal in all processes."""
        return key_name(key) or b""
