"""How far one rank's events have been applied, what is unknown of those before, and when to look
for events that did not arrive."""

import logging
import time
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

_SETTLE_S = 0.3
"""After connecting, until the publisher surely knows the subscription."""

SILENCE_S = 2.0
"""How long a worker may serve without the events that should follow before its event stream is
checked: some steps of a slow engine."""

_MUTE_LIMIT = 3
"""Silences, each confirmed by a replay, after which the state says so."""


@dataclass(slots=True)
class StreamStatistics:
    """Counters of one stream since start.

    Attributes:
        duplicates: messages that a replay had already brought.
        gaps: losses noticed.
        replays: replays asked for.
        restarts: times the sequence started over.
        losses: times that events were lost for good.
        malformed: unreadable messages by kind.
        lag_s: age of the last live event when it was applied, by the clocks of both hosts.
    """

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    replays: int = 0
    restarts: int = 0
    losses: int = 0
    malformed: Counter[str] = field(default_factory=Counter)
    lag_s: float | None = None


class Watch:
    """When to check for missing events: soon after one may have been missed, and when a worker
    serves requests without sending any. Moments are monotonic seconds.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._look_at: float | None = None
        self._silent_since: float | None = None
        self._last_event = float("-inf")
        self._silences = 0

    def heard_live(self, now: float) -> None:
        self._silent_since = None
        self._silences = 0
        self._last_event = now

    def heard_replayed(self, now: float) -> None:
        self._last_event = now

    def served(self, routed_at: float, now: float) -> None:
        """A request that was routed at ``routed_at``, and must have stored blocks, ended."""
        if self._last_event < routed_at and self._silent_since is None:
            self._silent_since = now

    def look_soon(self, now: float) -> None:
        """Look once what is on its way has arrived."""
        self._look_at = now + _SETTLE_S

    def look_at(self, moment: float) -> None:
        self._look_at = moment

    def due(self, now: float) -> bool:
        """Return whether to look now. If so, what was arranged is thereby done."""
        if self.silent(now) or (self._look_at is not None and now >= self._look_at):
            self._look_at = None
            return True
        return False

    def silent(self, now: float) -> bool:
        return self._silent_since is not None and now - self._silent_since >= self._silence_s

    def silence_over(self, *, confirmed: bool = False) -> None:
        """End a silence, ``confirmed`` if a replay has shown that there was nothing to send;
        the next begins with a request that ends later.
        """
        self._silent_since = None
        self._silences += confirmed

    @property
    def mute(self) -> bool:
        """Whether so many silences in a row were confirmed that the worker publishes nothing."""
        return self._silences >= _MUTE_LIMIT


class Progress:
    """The blocks of one rank, and the place in its sequence that they stand for.

    Attributes:
        next: number of the event to come; ``None`` if any may be.
        time: of the youngest event applied, by the worker's clock, in seconds.
        newest: highest number seen, applied or not; ``None`` before the first.
        unknown: why some held blocks are unknown; empty if none are.
        heard: whether live events have come since nothing else was to be had.
    """

    def __init__(self, blocks: TargetBlocks, label: str) -> None:
        self._blocks = blocks
        self._label = label
        self._fingerprint: int | None = None
        self.counters = StreamStatistics()
        self.next: int | None = None
        self.newest: int | None = None
        self.time = float("-inf")
        self.unknown = "no event has arrived yet"
        self.heard = False

    @property
    def expected(self) -> int:
        """Number of the event to come, the very first if any may be."""
        return self.next or 0

    @property
    def provable(self) -> bool:
        """Whether a copy of the last event would tell this run of the worker from another."""
        return self._fingerprint is not None

    def proves(self, payload: bytes) -> bool:
        return hash(payload) == self._fingerprint

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
        """Return a message's event; ``None`` if it can't be read."""
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
        """Count a message that is not what vLLM sends. The first of each kind is logged."""
        malformed = self.counters.malformed
        malformed[error.kind] += 1
        if malformed[error.kind] == 1:
            logger.warning("%s: %s; further ones are only counted", self._label, error)

    def see(self, sequence: int) -> None:
        self.newest = sequence if self.newest is None else max(self.newest, sequence)

    def apply(self, sequence: int, payload: bytes, batch: EventBatch) -> None:
        self._blocks.apply(batch)
        if self._blocks.unusable:
            self._use_none()
        elif any(isinstance(change, Cleared) for change in batch.changes):
            self.unknown = ""
        self.counters.batches += 1
        self.next = sequence + 1
        self.see(sequence)
        self._fingerprint = hash(payload)
        self.time = max(self.time, batch.time)

    def go_on(self) -> bool:
        left = self._blocks.go_on()
        if self._blocks.unusable:
            self._use_none()
        return left

    def pass_over(self, sequence: int, payload: bytes) -> None:
        """Go on behind an event that can't be read, which may have said anything."""
        self.lose(f"event {sequence} can't be read", sequence + 1)
        self._fingerprint = hash(payload)

    def adopt(self, sequence: int) -> None:
        """Let the first event to arrive, which is the next one thereby, say where we are."""
        if not self.heard:
            self.unknown = f"the first event to arrive was number {sequence}"
        if not sequence:
            self.unknown = ""
        self.heard = True
        self.next = sequence
        self.time = float("-inf")

    def lose(self, why: str, sequence: int | None) -> None:
        """Events are lost for good: forget everything and go on from ``sequence``."""
        self.counters.losses += 1
        self.unknown = why
        self._blocks.clear()
        self.next = sequence
        self._fingerprint = None
        logger.warning("%s: only blocks stored from now on are known: %s", self._label, why)

    def lose_touch(self, why: str) -> None:
        """Forget all, since it is in doubt, until live events say more."""
        self.lose(why, None)
        self.heard = False

    def skip_to(self, sequence: int) -> None:
        """The event of this number tells all, whatever was before it: nothing is lost."""
        self.next = sequence
        self._fingerprint = None
        self.time = float("-inf")

    def start_over(self) -> None:
        """Forget everything; all events are to come, from the very first on."""
        self._blocks.clear()
        self.newest = None
        self.unknown = ""
        self.skip_to(0)

    def give_up(self, why: str) -> None:
        """Hold nothing, since the events can't be used at all. Only the first reason counts."""
        if not self._blocks.unusable:
            self._blocks.unusable = why
            self._use_none()

    def _use_none(self) -> None:
        self._blocks.clear()
        logger.warning("%s: its events are not used: %s", self._label, self._blocks.unusable)


class LiveEvents:
    """Live events of one stream, in order."""

    def __init__(self, progress: Progress, watch: Watch) -> None:
        self._progress = progress
        self._watch = watch
        self._last: int | None = None

    def forget_order(self) -> None:
        """The next number may be any, as on a new connection or after a replay."""
        self._last = None

    def follow(self, sequence: int, payload: bytes, now: float, *, unaided: bool) -> str:
        """Apply an event, or return why a replay is needed instead, and then nothing has
        changed. Where none is to be had, ``unaided``, a gap is a loss.
        """
        progress = self._progress
        batch = progress.read(payload)
        if batch is None:
            # If it stood for an event, that is missing now: look for it soon.
            self._watch.look_soon(now)
            return ""
        if progress.next is None:
            progress.adopt(sequence)
            self._last = None
        expected = progress.expected
        rises = self._last is None or sequence > self._last
        # An event that is next by number but older by the clock may be of an earlier run.
        if rises and sequence == expected and (unaided or batch.time >= progress.time):
            self._apply(sequence, payload, batch)
            return ""
        if rises and sequence < expected and batch.time <= progress.time:
            self._last = sequence
            progress.counters.duplicates += 1
            return ""
        progress.counters.gaps += 1
        cause = (
            f"events {expected} to {sequence - 1} are missing"
            if sequence > expected
            else f"event {sequence} came after event {expected - 1}"
        )
        if not unaided:
            return cause
        progress.counters.restarts += sequence < expected
        progress.lose(cause, sequence)
        if not sequence:
            progress.unknown = ""  # nothing came before the very first event
        self._apply(sequence, payload, batch)
        return ""

    def _apply(self, sequence: int, payload: bytes, batch: EventBatch) -> None:
        self._last = sequence
        self._progress.apply(sequence, payload, batch)
        self._progress.counters.lag_s = max(0.0, time.time() - batch.time)
