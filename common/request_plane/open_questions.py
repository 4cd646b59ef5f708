"""Pending questions to another process, by number."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class OpenQuestions(Generic[T]):
    """Questions of one kind. Answers to none of them are dropped."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[T]] = {}

    def __len__(self) -> int:
        """How many are not answered."""
        return len(self._waiting)

    async def ask(self, send: Callable[[int], Awaitable[None]]) -> T:
        """Wait for the answer, however long it takes; cancelling leaves nothing behind.

        Args:
            send: sends the question of a number.

        Raises what ``send`` raises.
        """
        number = next(self._numbers)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await send(number)
            return await answer
        finally:
            del self._waiting[number]

    def answered(self, number: int, answer: T) -> None:
        """The answer to a question of a number, if anybody waits for it."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, error: Callable[[], Exception]) -> None:
        """No answer will come any more.

        Args:
            error: made for each who waits.
        """
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error())
