"""Where a new picture is processed: here, or by the worker that it goes to. No I/O, no clock.

A worker processes pictures of any frontend on one thread, which its engine does not need, and says
what that takes (:class:`common.step_sums.RenderingSums`). Against it stands how long a picture
would wait here before its turn comes: without a queue it never leaves.
"""

import math
import statistics
from typing import Final, NamedTuple

import msgspec

from common.identity import MmHash, RequestId, WorkerId
from common.step_sums import RenderingSums
from frontend.router.selection.media_placement import MediaPlacement

GUESS_MS: Final = 25.0
"""Of a worker for a megapixel, until some worker has said it. So a queue here has to be longer."""

MEMORY: Final = 100.0
"""Pictures after which evidence counts for a third."""

ENOUGH: Final = 3.0
"""Pictures from which on it is known what they take."""

MOST_LEFT: Final = 8
"""Pictures of this frontend that one worker may have to process at the same time."""

MOST_PIXELS_LEFT: Final = 100_000_000
"""The same of their pixels, unless it is one picture: decoded they take memory there."""

_SHORTEST_MS, _LONGEST_MS = 1e-3, 1e6
_MEGAPIXEL: Final = 1e6


class RenderingChoice(msgspec.Struct, frozen=True, gc=False):
    """Where one picture of a request was processed that nobody had processed before.

    Attributes:
        mm_hash: the picture.
        place: ``frontend`` or ``worker``.
        reason: why there, one of a handful of constant words.
        frontend_ms: how long it would have waited, or waited, for its turn in the frontend.
        worker_ms: after which the worker was expected to have it; None if it processes none.
    """

    mm_hash: MmHash
    place: str
    reason: str
    frontend_ms: float
    worker_ms: float | None


class _Left(NamedTuple):
    worker_id: WorkerId
    pixels: int


class _Known:
    """What a worker said, and what it has in hand."""

    __slots__ = ("last", "left", "left_pixels", "ms", "pictures", "pixels")

    def __init__(self, last: RenderingSums) -> None:
        self.last = last
        self.pictures = self.pixels = self.ms = 0.0
        self.left = self.left_pixels = 0

    def add(self, sums: RenderingSums) -> None:
        new = sums.pictures - self.last.pictures
        pixels, ms = sums.pixels - self.last.pixels, sums.ms - self.last.ms
        self.last = sums
        if new > 0.0 and pixels > 0.0 and ms >= 0.0:
            faded = math.exp(-new / MEMORY)
            self.pictures = faded * self.pictures + new
            self.pixels = faded * self.pixels + pixels
            self.ms = faded * self.ms + ms

    @property
    def rate(self) -> float | None:
        """Milliseconds for a megapixel; None if too little is known."""
        if self.pictures < ENOUGH:
            return None
        rate = self.ms / self.pixels * _MEGAPIXEL
        return min(max(rate, _SHORTEST_MS), _LONGEST_MS)


class Rendering:
    """What processing a picture takes on each worker, and what each was left.

    Args:
        media: which workers hold what.
    """

    def __init__(self, media: MediaPlacement) -> None:
        self._media = media
        self._workers: dict[WorkerId, _Known] = {}
        self._left: dict[RequestId, list[_Left]] = {}
        self._average = GUESS_MS

    def reported(self, worker_id: WorkerId, sums: RenderingSums) -> None:
        """What a worker processed by now. One that never says it is left nothing."""
        known = self._workers.get(worker_id)
        if known is None:
            known = self._workers[worker_id] = _Known(RenderingSums())
        known.add(sums)
        rates = [rate for one in self._workers.values() if (rate := one.rate) is not None]
        if rates:
            self._average = statistics.median(rates)

    def drop(self, worker_id: WorkerId) -> None:
        """A worker is gone; another under its name begins anew."""
        self._workers.pop(worker_id, None)

    def worker_ms(self, worker_id: WorkerId, pixels: int) -> float | None:
        """After which a worker would have a picture; None if it may not be left one now."""
        known = self._workers.get(worker_id)
        if known is None or known.left >= MOST_LEFT:
            return None
        in_hand = known.left_pixels
        if in_hand and in_hand + pixels > MOST_PIXELS_LEFT:
            return None
        rate = known.rate
        return (in_hand + pixels) / _MEGAPIXEL * (self._average if rate is None else rate)

    def sooner(self, pixels: int, wait_ms: float) -> bool:
        """Whether some worker would have a picture before its turn comes here."""
        return wait_ms > 0.0 and any(
            ms is not None and ms < wait_ms
            for ms in (self.worker_ms(worker_id, pixels) for worker_id in self._workers)
        )

    def held(self, mm_hash: MmHash) -> bool:
        """Whether a worker has acknowledged a picture, so that perhaps nobody has to process it."""
        return self._media.held(mm_hash)

    def left(self, request_id: RequestId, worker_id: WorkerId, pixels: int) -> None:
        """A request leaves a picture to its worker."""
        known = self._workers.get(worker_id)
        if known is not None:
            known.left += 1
            known.left_pixels += pixels
            self._left.setdefault(request_id, []).append(_Left(worker_id, pixels))

    def done(self, request_id: RequestId) -> None:
        """The worker has what the request left to it, or never will. May be told repeatedly."""
        for one in self._left.pop(request_id, ()):
            known = self._workers.get(one.worker_id)
            # Less than it says if the worker came back meanwhile.
            if known is not None and known.left:
                known.left -= 1
                known.left_pixels = max(0, known.left_pixels - one.pixels)
