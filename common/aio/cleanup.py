"""Give back what was acquired: at the end of a ``with``, or if a later step fails."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Self, TypeVar


class Released(ABC):
    """Something held until :meth:`release`, at the latest until the end of a ``with``."""

    @abstractmethod
    def release(self) -> None:
        """Give it back. The second and later calls do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


Made = TypeVar("Made")


async def made_in_thread(make: Callable[[], Made], undo: Callable[[Made], object]) -> Made:
    """What a thread makes. The thread can't be stopped: if nobody waits any more, what it makes
    is undone.

    Args:
        undo: called on the event loop.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(partial(_undo_late, undo))
        raise


def _undo_late(undo: Callable[[Made], object], making: "asyncio.Future[Made]") -> None:
    if not making.cancelled() and making.exception() is None:
        undo(making.result())


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call something if the block does not reach its end, cancelled or otherwise.

    The error goes on.
    """
    try:
        yield
    except BaseException:
        undo()
        raise
