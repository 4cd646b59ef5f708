"""What was taken is given back if what it was taken for fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
