"""Adds up what an engine says of its steps, and what media took to arrive."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from common.step_sums import EngineSums, RenderingSums, ShippingSums, StepSums

LONGEST_STEP_MS: Final = 60_000.0
"""A step that took longer was no step: the engine was paused, or its host asleep."""


class StepCounter:
    """Of one rank."""

    def __init__(self) -> None:
        self._prompts = 0
        self._decoding = self._prefilling = self._encoding = StepSums()

    def add(
        self, *, prefill: int, encode: int, decode: int, prompts: int, waited_ms: float,
        since_last_ms: Sequence[float],
    ) -> None:  # fmt: skip
        """One step.

        Args:
            prefill: prompt tokens.
            encode: media tokens.
            decode: requests.
            prompts: that were computed to their end.
            waited_ms: how long the engine waited for the device, which is less than the step where
                it prepared the next one meanwhile.
            since_last_ms: for each request that decoded, how long its last token was ago. The least
                is the length of the step: a request may have been left out of the one before.
        """
        ms = max(waited_ms, min(since_last_ms, default=0.0))
        self._prompts += prompts
        if not 0.0 <= ms <= LONGEST_STEP_MS:
            return
        if encode:
            self._encoding = self._encoding.plus(prefill, encode, decode, ms)
        elif prefill:
            self._prefilling = self._prefilling.plus(prefill, 0, decode, ms)
        else:
            self._decoding = self._decoding.plus(0, 0, decode, ms)

    def sums(self, rank: int) -> EngineSums:
        """What all add up to."""
        return EngineSums(rank, self._prompts, self._decoding, self._prefilling, self._encoding)


class ShippingCounter:
    """Of a worker."""

    def __init__(self) -> None:
        self.sums = ShippingSums()

    def add(self, nbytes: int, ms: float) -> None:
        """Media of one request arrived."""
        if nbytes:
            self.sums = ShippingSums(self.sums.nbytes + nbytes, self.sums.ms + ms)


class RenderingCounter:
    """Of a worker: pictures that it processed itself. The time while it was at several counts once.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.sums = RenderingSums()
        self._clock = clock
        self._under_way = 0
        self._as_of = 0.0

    @contextmanager
    def picture(self, pixels: int) -> Iterator[None]:
        """One of them, from its bytes to its tensors. One that is no good counts as time only."""
        self._add(0, 0)
        self._under_way += 1
        try:
            yield
            self._add(1, pixels)
        finally:
            self._add(0, 0)
            self._under_way -= 1

    def _add(self, pictures: int, pixels: int) -> None:
        now = self._clock()
        ms = (now - self._as_of) * 1e3 if self._under_way else 0.0
        self._as_of = now
        if pictures or ms:
            was = self.sums
            self.sums = RenderingSums(was.pictures + pictures, was.pixels + pixels, was.ms + ms)
