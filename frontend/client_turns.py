"""Turns and shares of clients at what all use, so that one's many requests delay others' by few."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from common.aio.cleanup import undo_on_error
from frontend.request_context import current_context

T = TypeVar("T")

CLIENT_SHARE: Final = 7 / 8
"""Fraction of a shared room that one client's requests may take: eight of the largest had small
ones of all other clients answered 429."""

CHOICES_LIKE_CHATS: Final = 4
"""Choices of a request's only call that start without waiting, as that many chats would. All other
calls are bulk calls, which share room that all clients' need."""


class ClientTurns:
    """A semaphore for each client that holds or waits for one, or for each of its hosts."""

    def __init__(self, most: int) -> None:
        """``most`` requests of a client have their turn at a time."""
        self._most: Final = most
        self._turns: WeakValueDictionary[object, asyncio.Semaphore] = WeakValueDictionary()

    def of_client(self, host: str = "") -> asyncio.Semaphore:
        """Return the semaphore of this task's client. Keep it as long as it is held."""
        key = (current_context().client, host)
        return self._turns.setdefault(key, asyncio.Semaphore(self._most))

    async def run(self, threads: Executor, work: Callable[[], T]) -> T:
        """Run a function in a thread. The turn lasts until it returns, even if nobody waits for it
        any more: a client that leaves can't take more threads.
        """
        turn, loop = self.of_client(), asyncio.get_running_loop()
        await turn.acquire()

        def returned(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turn.release)

        def submitted() -> Future[T]:
            with undo_on_error(turn.release):
                running = threads.submit(work)
            running.add_done_callback(returned)
            return running

        # In no variable: an error of the work, and what its frames hold, would stay in a cycle.
        return await asyncio.wrap_future(submitted())


class ClientShares:
    """Limits the sum of what one client's requests take, each from some moment to its end."""

    def __init__(self) -> None:
        self._clients: WeakValueDictionary[str, _Shares] = WeakValueDictionary()

    async def take(self, amount: float, most: float, *, waits: bool) -> bool:
        """Add to what this task's request takes, once its client takes no more than ``most``;
        return whether it could, at once unless it ``waits``. The longest holder of a share waits
        for none: its request may need more before it ends.
        """
        context = current_context()
        if (share := context.find(_Share)) is None:
            share = _Share(self._clients.setdefault(context.client, _Shares()))
            context.put(share)
            context.held.callback(share.release)
        return await share.grow(amount, most, waits=waits)


class _Shares:
    """The shares of one client's requests, the oldest first."""

    def __init__(self) -> None:
        self.taken: dict[_Share, float] = {}
        self.freed = asyncio.Event()


class _Share:
    """What one request takes."""

    def __init__(self, client: _Shares) -> None:
        self._client = client

    async def grow(self, amount: float, most: float, *, waits: bool) -> bool:
        taken = self._client.taken
        while sum(taken.values()) + amount > most and next(iter(taken), self) is not self:
            if not waits:
                return False
            await self._client.freed.wait()
        taken[self] = taken.get(self, 0.0) + amount
        return True

    def release(self) -> None:
        if self._client.taken.pop(self, None) is not None:
            self._client.freed.set()
            self._client.freed = asyncio.Event()
