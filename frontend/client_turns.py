"""Turns of clients at what all share, so that many requests of one delay another's by few."""

import asyncio
from typing import Final
from weakref import WeakValueDictionary

from frontend.request_context import current_context


class ClientTurns:
    """A semaphore for each client that holds or waits for one."""

    def __init__(self, most: int) -> None:
        """``most`` requests of a client have their turn at a time."""
        self._most: Final = most
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of_client(self) -> asyncio.Semaphore:
        """Return the semaphore of this task's client. Keep it as long as it is held."""
        return self._turns.setdefault(current_context().client, asyncio.Semaphore(self._most))
