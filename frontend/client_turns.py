"""Turns of clients at what all share, so that many requests of one delay another's by few."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from common.aio.cleanup import undo_on_error
from frontend.request_context import current_context

T = TypeVar("T")


class ClientTurns:
    """A semaphore for each client that holds or waits for one."""

    def __init__(self, most: int) -> None:
        """``most`` requests of a client have their turn at a time."""
        self._most: Final = most
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of_client(self) -> asyncio.Semaphore:
        """Return the semaphore of this task's client. Keep it as long as it is held."""
        return self._turns.setdefault(current_context().client, asyncio.Semaphore(self._most))

    async def run(self, threads: Executor, work: Callable[[], T]) -> T:
        """Run a function in a thread. The turn lasts until it returns, even if nobody waits for it
        any more: a client that leaves can't take more threads.
        """
        turn, loop = self.of_client(), asyncio.get_running_loop()
        await turn.acquire()
        with undo_on_error(turn.release):
            running = threads.submit(work)

        def returned(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turn.release)

        running.add_done_callback(returned)
        return await asyncio.wrap_future(running)
