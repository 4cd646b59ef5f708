"""Log progress while a long operation runs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from common.backoff import Backoff

FIRST_S: Final = 10.0
"""After which the first line comes; what takes less says nothing."""

LONGEST_S: Final = 60.0


@contextmanager
def still_busy(
    what: str,
    say: Callable[[str], object],
    *,
    first_s: float = FIRST_S,
    longest_s: float = LONGEST_S,
) -> Iterator[None]:
    """Say how long something has been under way, ever more rarely, until it has ended.

    A thread does, so it is said too while the event loop stands still.

    Args:
        what: as the beginning of a sentence, for example ``waiting for workers``.
        say: gets the lines, in that thread.
        first_s: seconds until the first line; each pause after it is twice as long as the last.
        longest_s: the longest pause.
    """
    ended = threading.Event()
    began = time.monotonic()

    def speak() -> None:
        backoff = Backoff(first_s, longest_s)
        while not ended.wait(backoff.next_s()):
            say(f"{what} ({time.monotonic() - began:.0f} s so far)")

    speaker = threading.Thread(target=speak, name="still-busy", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()
