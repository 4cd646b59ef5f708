"""Release resources at the end of a ``with``, or if a later step fails."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self, TypeVar


class Released(ABC):
    """A resource held until :meth:`release`, at the latest until the end of a ``with``."""

    @abstractmethod
    def release(self) -> None:
        """Release the resource. Later calls do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


Made = TypeVar("Made")


async def made_in_thread(make: Callable[[], Made], undo: Callable[[Made], object]) -> Made:
    """Run ``make`` in a thread, which can't be stopped; if cancelled, ``undo`` its result."""
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
    """Call ``undo`` if the block does not complete, even by cancellation; the error propagates."""
    try:
        yield
    except BaseException:
        undo()
        raise
