"""Whose turn it is to connect, or to apply a message of events.

A frontend that joins a fleet connects to all ranks and gets a million blocks from them at once, and
serves requests meanwhile: it does one of these things at a time, and the event loop is free between
them.
"""

import asyncio
import time
from types import TracebackType

_SLICE_S = 0.001
"""How long messages are applied before others on the event loop get their turn."""


class Turns:
    """``async with`` it to apply one message. Whoever waits longest is next.

    Nothing may be waited for meanwhile.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._spent = 0.0
        self._began = 0.0

    async def come(self) -> None:
        """Wait for a turn that takes no longer than until the caller next waits for something."""
        async with self._lock:
            await asyncio.sleep(0)

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        self._began = time.perf_counter()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spent += time.perf_counter() - self._began
        try:
            if self._spent > _SLICE_S:
                self._spent = 0.0
                await asyncio.sleep(0)
        finally:
            self._lock.release()
