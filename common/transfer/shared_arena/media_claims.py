"""Which media are known by name, which are being processed, and by which process of a frontend.

For one event loop.
"""

import asyncio
from collections.abc import Hashable
from functools import partial
from typing import Final

from blake3 import blake3

from common.errors import ArenaUnavailableError
from common.identity import MmHash
from common.lru import Lru
from common.transfer.arena import Lease
from common.transfer.shared_arena.client import ANSWER_S, SharedArena
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
    """Return 32 bytes that are equal in all processes, as a key's hash is not; None for a key that
    is like no other in any process."""
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
        names = self._spaces.get(space)
        return None if names is None else names.get(name)

    def clear(self) -> None:
        self._spaces.clear()


class MediaClaims:
    """Which media are kept or being processed, and whose names they have."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena

    async def claim(self, key: bytes) -> Lease | None:
        """An item that is kept, or None if this process is to process it, and to say
        :meth:`landed`. Waits for whoever is at a medium of the same key."""
        asked = self._arena.connection.ask(partial(Claim, key=key))
        try:
            answer = await asyncio.wrap_future(asked)
        except ArenaUnavailableError:
            return None  # each for itself
        return self._arena.granted(answer) if isinstance(answer, Granted) else None

    def landed(self, key: bytes, mm_hash: MmHash | None) -> None:
        """A claimed medium was processed, and became an item, or nothing."""
        self._arena.connection.tell(Landed(key, mm_hash))

    async def remember(self, space: bytes, name: bytes, mm_hash: MmHash, most: int) -> None:
        """A name stands for an item, in all processes from the end of this on, in a space of so
        many names."""
        question = partial(Remember, space=space, name=name, mm_hash=mm_hash, most=most)
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.wrap_future(self._arena.connection.ask(question))
        except (ArenaUnavailableError, TimeoutError):
            return  # then it isn't remembered, as if it had been dropped

    async def recall(self, space: bytes, name: bytes) -> MmHash | None:
        """What a name stands for, if that is known."""
        question = partial(Recall, space=space, name=name)
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await asyncio.wrap_future(self._arena.connection.ask(question))
        except (ArenaUnavailableError, TimeoutError):
            return None
        return answer.mm_hash if isinstance(answer, Recalled) else None
