"""Calls that are made once for all who ask for the same thing at the same time.

Nothing is remembered after a call has ended, failures least of all: who asks later
asks anew.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.passengers = 0
        self.aboard = 0


class SingleFlight(Generic[T]):
    """Calls under way, by key."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[T]] = {}

    def __len__(self) -> int:
        """Calls under way."""
        return len(self._flights)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a call is under way that the next caller would join."""
        return key in self._flights

    async def run(
        self, key: Hashable, start: Callable[[], Coroutine[Any, Any, T]]
    ) -> tuple[T, bool]:
        """Join the call of that key, or start it.

        A caller that is cancelled leaves the others to it. The last one's cancellation
        cancels the call and returns when that has ended.

        Returns:
            What the call returned, and whether anyone else got the very same object.

        Raises what the call raised, to every caller.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(start()))
            flight.task.add_done_callback(lambda task: self._land(key, task))
        flight.passengers += 1
        flight.aboard += 1
        try:
            await asyncio.wait([flight.task])
        finally:
            flight.aboard -= 1
            if flight.aboard == 0 and not flight.task.done():
                self._land(key, flight.task)  # nobody must join what is being cancelled
                flight.task.cancel()
                await asyncio.wait([flight.task])
        return flight.task.result(), flight.passengers > 1

    async def close(self) -> None:
        """Cancel every call under way; its callers are cancelled with it."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _land(self, key: Hashable, task: asyncio.Task[T]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        if task.done() and not task.cancelled():
            task.exception()  # seen, also if every caller has gone
