"""A step in a thread that does not come back, for as long as a test wants."""

import threading
from types import TracebackType
from typing import Final, Self

from common.observability.watchdog import allow

EVER: Final = 1e6


class Hanging:
    """In the place of a step. At the end of a ``with`` whatever hangs goes on.

    Attributes:
        asked: how often it hung.
        hangs: whether the next one does.
    """

    def __init__(self, original: object) -> None:
        self._original = original
        self.go = threading.Event()
        self.asked = 0
        self.hangs = True

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Hang, without a moment's patience of the watchdog, or do what the step does."""
        if self.hangs:
            self.asked += 1
            allow(-EVER)
            self.go.wait()
        assert callable(self._original)
        return self._original(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hangs = False
        self.go.set()
