"""Adds up what an engine says of its steps, and what media took to arrive."""

from collections.abc import Sequence
from typing import Final

from common.request_plane.step_sums import EngineSums, ShippingSums, StepSums

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
