"""What was left for the garbage collector to close."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closes_all() -> Iterator[None]:
    """Fails if a socket, a connection or a file that was opened within is closed by nobody.

    What earlier tests left does not count.
    """
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
        complaints.clear()
        yield
        gc.collect()
    assert not complaints, [str(each.message) for each in complaints]
