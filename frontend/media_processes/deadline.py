"""An end to waiting for another process."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Deadline:
    """Calls a function, in a thread, if what it is around takes too long.

    Attributes:
        missed: whether it did.
    """

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        """
        Args:
            give_up: makes whoever waits stop waiting.
        """
        self._at = time.monotonic() + seconds
        self._give_up = give_up
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="media-deadline", daemon=True)
        self.missed = False

    def extend(self, seconds: float) -> None:
        """There is more to do than was known at first."""
        self._at += seconds

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()  # so that nothing is given up after this

    def _watch(self) -> None:
        while (left := self._at - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        self.missed = True
        self._give_up()
