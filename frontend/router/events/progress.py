"""Apply one rank's events, and track the position reached and losses."""

import logging
from collections import Counter
from dataclasses import dataclass, field

from frontend.router.event_wire import (
    Cleared,
    EventBatch,
    MalformedEventError,
    decode_batch,
    decode_sequence,
)
from frontend.router.index import TargetBlocks

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StreamStatistics:
    """Counters of one stream since start.

    Attributes:
        duplicates: messages that a replay had already brought.
        losses: times that events were lost for good.
        lag_s: age of the last live event when applied, by the clocks of both hosts.
    """

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    replays: int = 0
    losses: int = 0
    malformed: Counter[str] = field(default_factory=Counter)
    lag_s: float | None = None


class Progress:
    """Blocks of one rank, and the position in its event sequence that they represent.

    Attributes:
        time: of the youngest applied event, by the worker's clock, in seconds.
        newest: highest number seen, applied or not; ``None`` before the first.
        unknown: why some held blocks are unknown; empty if all are known.
    """

    def __init__(self, blocks: TargetBlocks, label: str) -> None:
        self._blocks = blocks
        self._label = label
        self.counters = StreamStatistics()
        self.next = 0
        self.newest: int | None = None
        self.time = float("-inf")
        self.unknown = ""

    @property
    def so_far(self) -> str:
        known = f"{self._blocks.held:,} blocks so far"
        if self.next:
            known += f", up to event {self.next - 1:,}"
        return known if self.newest is None else f"{known}; the newest seen is {self.newest:,}"

    def read_sequence(self, frame: bytes) -> int | None:
        try:
            return decode_sequence(frame)
        except MalformedEventError as error:
            self.count(error)
            return None

    def read(self, payload: bytes) -> EventBatch | None:
        try:
            return decode_batch(payload)
        except MalformedEventError as error:
            self.count(error)
            if error.kind == "integer-hashes":
                self.give_up(
                    "its events carry hashes cut to 64 bits; "
                    "start it without VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
                )
            return None

    def count(self, error: MalformedEventError) -> None:
        """Count a malformed message; log the first of each kind."""
        malformed = self.counters.malformed
        malformed[error.kind] += 1
        if malformed[error.kind] == 1:
            logger.warning("%s: %s; further ones are only counted", self._label, error)

    def see(self, sequence: int) -> None:
        self.newest = sequence if self.newest is None else max(self.newest, sequence)

    def apply(self, batch: EventBatch) -> None:
        self._blocks.apply(batch)
        if self._blocks.unusable:
            self._use_none()
        elif any(isinstance(change, Cleared) for change in batch.changes):
            self.unknown = ""
        self.counters.batches += 1
        self.see(self.next)
        self.next += 1
        self.time = max(self.time, batch.time)

    def apply_replayed(self, sequence: int, payload: bytes) -> None:
        """Apply an event of a replay, which leaves out events that no longer exist."""
        if sequence < self.next:
            return
        batch = self.read(payload)
        if batch is None:
            # The event is unknown, and another replay would bring the same.
            self.lose(f"event {sequence} can't be read", sequence + 1)
            return
        if sequence > self.next and not batch.begins_anew:
            self.lose(f"events before {sequence} are no longer replayed", sequence)
        elif sequence > self.next:
            self.next, self.time = sequence, float("-inf")  # a snapshot: nothing is lost
        self.apply(batch)

    def go_on(self) -> bool:
        left = self._blocks.go_on()
        if self._blocks.unusable:
            self._use_none()
        return left

    def lose(self, why: str, sequence: int) -> None:
        """Forget everything and continue from ``sequence``: earlier events are lost for good."""
        self.counters.losses += 1
        self.unknown = why
        self._blocks.clear()
        self.next = sequence
        logger.warning("%s: only blocks stored from now on are known: %s", self._label, why)

    def start_over(self) -> None:
        """Forget everything and expect all events from the first on."""
        self._blocks.clear()
        self.next = 0
        self.newest = None
        self.time = float("-inf")
        self.unknown = ""

    def give_up(self, why: str) -> None:
        """Hold no blocks, since the events are unusable. Only the first reason counts."""
        if not self._blocks.unusable:
            self._blocks.unusable = why
            self._use_none()

    def _use_none(self) -> None:
        self._blocks.clear()
        logger.warning("%s: its events are not used: %s", self._label, self._blocks.unusable)
