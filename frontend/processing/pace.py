"""How long a medium that comes now would wait for its turn to be processed here."""

import math
import time
from collections.abc import Callable
from typing import Final

from frontend.processing.backends import Backend
from frontend.processing.batch import Batch, Processed

MEMORY: Final = 100.0
"""Media after which evidence counts for a third."""


class Pace(Backend):
    """A backend, and how fast it is: what it takes for a medium, while it has something to do.

    For one event loop.
    """

    def __init__(self, inner: Backend, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            clock: seconds.
        """
        self._inner = inner
        self._clock = clock
        self._waiting = 0
        self._media = self._ms = self._since_ms = 0.0
        self._as_of = 0.0

    @property
    def width(self) -> int:
        """How many batches it works on at the same time."""
        return self._inner.width

    @property
    def wait_ms(self) -> float:
        """Until all that is there is processed. 0 until it has processed something."""
        return self._waiting * self._ms / self._media if self._media else 0.0

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        """See :class:`Backend`."""
        self._pass_time()
        self._waiting += len(batch.media)
        try:
            return await self._inner.run(batch, abandoned)
        finally:
            self._pass_time()
            self._waiting -= len(batch.media)
            faded = math.exp(-len(batch.media) / MEMORY)
            self._media = faded * self._media + len(batch.media)
            self._ms = faded * self._ms + self._since_ms
            self._since_ms = 0.0

    def _pass_time(self) -> None:
        now = self._clock()
        if self._waiting:
            self._since_ms += (now - self._as_of) * 1e3
        self._as_of = now
