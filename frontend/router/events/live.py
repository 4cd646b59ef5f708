"""Live events: applied in order, and what is wrong with those that can't be."""

import time

from frontend.router.event_wire import EventBatch
from frontend.router.events.feed import StreamStatistics
from frontend.router.events.progress import Progress, Reader
from frontend.router.events.watch import Watch


class LiveEvents:
    """The live events of one stream.

    Args:
        progress: what they are applied to.
        reader: reads them.
        watch: is told when one may be missing.
        counters: of the stream.
    """

    def __init__(
        self, progress: Progress, reader: Reader, watch: Watch, counters: StreamStatistics
    ) -> None:
        self._progress = progress
        self._reader = reader
        self._watch = watch
        self._counters = counters
        self._last: int | None = None

    def forget_order(self) -> None:
        """The next number may be any, as on a new connection or after a replay."""
        self._last = None

    def follow(self, sequence: int, payload: bytes, now: float, *, unaided: bool) -> str:
        """Apply an event, or find out why it can't be.

        Args:
            unaided: whether no replay is to be had, so that a gap is a loss.

        Returns:
            Why a replay is needed, and then it changed nothing; empty if none is.
        """
        batch = self._reader.batch(payload)
        if batch is None:
            # If it stood for an event, that is missing now: look for it soon.
            self._watch.look_soon(now)
            return ""
        progress = self._progress
        expected = progress.next
        if expected is None:
            expected = progress.adopt(sequence)
            self._last = None
        rises = self._last is None or sequence > self._last
        # An event that is next by number but older by the clock may be of an earlier run.
        if rises and sequence == expected and (unaided or batch.time >= progress.time):
            self._apply(sequence, payload, batch)
            return ""
        if rises and sequence < expected and batch.time <= progress.time:
            self._last = sequence
            self._counters.duplicates += 1
            return ""
        self._counters.gaps += 1
        cause = (
            f"events {expected} to {sequence - 1} are missing"
            if sequence > expected
            else f"event {sequence} came after event {expected - 1}"
        )
        if not unaided:
            return cause
        self._counters.restarts += sequence < expected
        self._go_on(sequence, payload, batch, cause)
        return ""

    def _go_on(self, sequence: int, payload: bytes, batch: EventBatch, cause: str) -> None:
        """Accept a loss that nothing can repair."""
        self._progress.lose(cause, sequence)
        if not sequence:
            self._progress.unknown = ""  # nothing came before the very first event
        self._apply(sequence, payload, batch)

    def _apply(self, sequence: int, payload: bytes, batch: EventBatch) -> None:
        self._last = sequence
        self._progress.apply(sequence, payload, batch)
        self._counters.lag_s = max(0.0, time.time() - batch.time)
