"""Names and claims of media across a frontend's processes. For one event loop."""

import asyncio
from collections.abc import Hashable
from functools import partial
from typing import Final

from blake3 import blake3

from common.errors import ArenaUnavailableError
from common.identity import MmHash
from common.lru import Lru
from common.transfer.arena import Lease
from common.transfer.shared_arena.client import SharedArena
from common.transfer.shared_arena.messages import (
    Claim,
    Granted,
    Landed,
    Recall,
    Recalled,
    Remember,
)

HASHES_KEPT: Final = 100_000
"""Media whose hash is remembered; the one asked for longest ago goes first."""


def key_name(key: Hashable) -> bytes | None:
    """Hash a key to 32 bytes, equal in all processes; None if that is impossible."""
    try:
        return blake3(_text(key).encode("utf-8", "surrogatepass")).digest()
    except TypeError:
        return None


def _text(value: object) -> str:
    # A set's order differs between processes.
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(_text, value))) + "}"
    if isinstance(value, tuple):
        return "(" + ",".join(map(_text, value)) + ")"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    raise TypeError(f"{value!r} has no name")


class MediaNames:
    """Names of items, in LRU caches by space."""

    def __init__(self) -> None:
        self._spaces: dict[bytes, Lru[bytes, MmHash]] = {}

    def remember(self, space: bytes, name: bytes, mm_hash: MmHash, most: int) -> None:
        """Name an item; may evict the least recently used name."""
        self._spaces.setdefault(space, Lru(most)).put(name, mm_hash)

    def recall(self, space: bytes, name: bytes) -> MmHash | None:
        names = self._spaces.get(space)
        return None if names is None else names.get(name)

    def clear(self) -> None:
        self._spaces.clear()


class MediaClaims:
    """A client's access to media claims and names."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena

    async def claim(self, key: Hashable) -> Lease | None:
        """Return a medium's kept item, or None if this process must make it and call
        :meth:`landed`. Waits for another process with the same key. Claim several in the order of
        :func:`key_name`, to avoid deadlocks."""
        if (name := key_name(key)) is None:
            return None
        asked = self._arena.connection.ask(partial(Claim, key=name))
        try:
            answer = await asyncio.wrap_future(asked)
        except ArenaUnavailableError:
            return None  # each for itself
        return self._arena.granted(answer) if isinstance(answer, Granted) else None

    def landed(self, key: Hashable, mm_hash: MmHash | None) -> None:
        """End a claim, with the item's hash or None."""
        if (name := key_name(key)) is not None:
            self._arena.connection.tell(Landed(name, mm_hash))

    async def remember(self, space: bytes, name: bytes, mm_hash: MmHash, most: int) -> None:
        """Name an item in all processes, in a space of at most ``most`` names."""
        question = partial(Remember, space=space, name=name, mm_hash=mm_hash, most=most)
        try:
            await asyncio.wrap_future(self._arena.connection.ask(question))
        except ArenaUnavailableError:
            return  # then it isn't remembered, as if it had been dropped

    async def recall(self, space: bytes, name: bytes) -> MmHash | None:
        """Return the item of a name, if known."""
        question = partial(Recall, space=space, name=name)
        try:
            answer = await asyncio.wrap_future(self._arena.connection.ask(question))
        except ArenaUnavailableError:
            return None
        return answer.mm_hash if isinstance(answer, Recalled) else None
