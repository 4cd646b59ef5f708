"""Ask and tell which media the processes of a frontend have processed, or are processing.

For one event loop.
"""

import asyncio
from functools import partial

from common.errors import ArenaUnavailableError
from common.identity import MmHash
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


class MediaDirectory:
    """Which media are kept or being processed, and whose names they have."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena

    async def claim(self, key: bytes) -> Lease | None:
        """An item that is kept, or None if this process is to process it, and to say
        :meth:`landed`. Waits for whoever is at it.

        Args:
            key: equal for media that are processed alike.
        """
        asked = self._arena.connection.ask(partial(Claim, key=key))
        try:
            answer = await asyncio.wrap_future(asked)
        except ArenaUnavailableError:
            return None  # each for itself
        return self._arena.granted(answer) if isinstance(answer, Granted) else None

    def landed(self, key: bytes, mm_hash: MmHash | None) -> None:
        """A claimed medium was processed.

        Args:
            mm_hash: of what came of it; None if nothing did.
        """
        self._arena.connection.tell(Landed(key, mm_hash))

    async def remember(self, space: bytes, name: bytes, mm_hash: MmHash, most: int) -> None:
        """A name stands for an item, in all processes from the end of this on.

        Args:
            space: whose name it is.
            most: names kept in that space.
        """
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
