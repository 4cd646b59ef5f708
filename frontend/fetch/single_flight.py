"""Single-flight: concurrent requests for the same key share one call.

Results are not kept, failures least of all: a later request starts a new call.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from common.observability.tracing import current, link_to

T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.span = current()  # of the first caller
        self.passengers = 0
        self.waiters = 0


class SingleFlight(Generic[T]):
    """In-flight calls, by key."""

    def __init__(self, *, not_shared: tuple[type[Exception], ...] = ()) -> None:
        """``not_shared`` errors concern only the caller who started the call; callers who joined it
        start their own then.
        """
        self._not_shared = not_shared
        self._flights: dict[Hashable, _Flight[T]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._flights

    async def run(
        self, key: Hashable, start: Callable[[], Coroutine[Any, Any, T]]
    ) -> tuple[T, bool]:
        """Join the call of that key, or start it. Raises its error to every caller.

        A cancelled caller leaves; the last one's cancellation cancels the call and returns when
        that has ended. Returns the result, and whether another caller got the very same object.
        """
        while True:
            flight = self._flights.get(key)
            if flight is None:
                return await self._board(key, self._start(key, start))
            link_to(flight.span)
            try:
                return await self._board(key, flight)
            except self._not_shared:
                continue
            finally:
                del flight  # see _board

    def _start(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, T]]) -> _Flight[T]:
        flight = self._flights[key] = _Flight(asyncio.create_task(start()))
        flight.task.add_done_callback(lambda task: self._land(key, task))
        return flight

    async def _board(self, key: Hashable, flight: _Flight[T]) -> tuple[T, bool]:
        flight.passengers += 1
        flight.waiters += 1
        try:
            await asyncio.wait([flight.task])
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                self._land(key, flight.task)  # no caller may join a cancelled call
                flight.task.cancel()
                await asyncio.wait([flight.task])
        try:
            return flight.task.result(), flight.passengers > 1
        finally:
            # Break a cycle: an error refers to this frame and the flight to the error. Objects in
            # its frames, budgets too, would wait for the garbage collector.
            del flight

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
            task.exception()  # mark as retrieved: callers may be gone
