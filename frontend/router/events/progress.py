"""How far one rank's events have been applied, and what is unknown of those before."""

import logging
from typing import Protocol

from frontend.router.event_wire import (
    Cleared,
    EventBatch,
    MalformedEventError,
    decode_batch,
    decode_sequence,
)
from frontend.router.events.feed import StreamStatistics

logger = logging.getLogger(__name__)


class Blocks(Protocol):
    """What a stream does to the indexes; see :class:`~target_blocks.TargetBlocks`.

    Attributes:
        unusable: why the events can't be used at all; empty if they can.
        unmodelled: why hits may be shorter than indexed; empty if they are not.
        held: how many there are, summed over cache groups.
    """

    unusable: str
    unmodelled: str

    @property
    def held(self) -> int: ...

    def apply(self, batch: EventBatch) -> None:
        """Apply one batch, a large one in part."""

    def go_on(self) -> bool:
        """Apply more of what is left of batches; return whether anything still is."""

    def clear(self) -> None:
        """Forget all blocks."""

    def suspend(self) -> None:
        """Keep the blocks but let nobody route on them."""

    def resume(self) -> None:
        """Let the blocks be routed on."""


class Progress:
    """The blocks of one rank, and the place in its sequence that they stand for.

    Args:
        blocks: where events are applied.
        label: what to call the stream in log lines.
        counters: of the stream.

    Attributes:
        next: number of the event to come; ``None`` if any may be.
        time: of the youngest event applied, by the worker's clock, in seconds.
        newest: highest number seen, applied or not; ``None`` before the first.
        unknown: why some held blocks are unknown; empty if none are.
        heard: whether live events have come since nothing else was to be had.
    """

    def __init__(self, blocks: Blocks, label: str, counters: StreamStatistics) -> None:
        self._blocks = blocks
        self._label = label
        self._counters = counters
        self._fingerprint: int | None = None
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
        """Whether this is the last event applied."""
        return hash(payload) == self._fingerprint

    @property
    def so_far(self) -> str:
        """How much is known, in words."""
        known = f"{self._blocks.held:,} blocks so far"
        if self.next:
            known += f", up to event {self.next - 1:,}"
        return known if self.newest is None else f"{known}; the newest seen is {self.newest:,}"

    def see(self, sequence: int) -> None:
        """An event exists."""
        self.newest = sequence if self.newest is None else max(self.newest, sequence)

    def apply(self, sequence: int, payload: bytes, batch: EventBatch) -> None:
        """Apply an event, whatever came before it."""
        self._blocks.apply(batch)
        if self._blocks.unusable:
            self._use_none()
        else:
            for change in batch.changes:
                if isinstance(change, Cleared):
                    self.unknown = ""
        self._counters.batches += 1
        self.next = sequence + 1
        self.see(sequence)
        self._fingerprint = hash(payload)
        self.time = max(self.time, batch.time)

    def go_on(self) -> bool:
        """Apply more of what is left of events; return whether anything still is."""
        left = self._blocks.go_on()
        if self._blocks.unusable:
            self._use_none()
        return left

    def pass_over(self, sequence: int, payload: bytes) -> None:
        """Go on behind an event that can't be read, which may have said anything."""
        self.lose(f"event {sequence} can't be read", sequence + 1)
        self._fingerprint = hash(payload)

    def adopt(self, sequence: int) -> int:
        """Let the first event to arrive say where we are.

        Returns:
            Its number, which is now the one expected.
        """
        if not self.heard:
            self.unknown = f"the first event to arrive was number {sequence}"
        if not sequence:
            self.unknown = ""
        self.heard = True
        self.next = sequence
        self.time = float("-inf")
        return sequence

    def lose(self, why: str, sequence: int | None) -> None:
        """Events are lost for good: forget everything and go on from ``sequence``."""
        self._counters.losses += 1
        self.unknown = why
        self._blocks.clear()
        self.next = sequence
        self._fingerprint = None
        logger.warning("%s: only blocks stored from now on are known: %s", self._label, why)

    def lose_touch(self, why: str) -> None:
        """Whatever was known is in doubt: forget it, until live events say more."""
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
        self.next = 0
        self.newest = None
        self._fingerprint = None
        self.time = float("-inf")
        self.unknown = ""

    def give_up(self, why: str) -> None:
        """The events can't be used at all: hold nothing. Only the first reason counts."""
        if not self._blocks.unusable:
            self._blocks.unusable = why
            self._use_none()

    def _use_none(self) -> None:
        self._blocks.clear()
        logger.warning("%s: its events are not used: %s", self._label, self._blocks.unusable)


class Reader:
    """Reads the messages of one stream.

    Args:
        progress: which hashes of another width than ours make unusable.
        label: what to call the stream in log lines.
        counters: of the stream.
    """

    def __init__(self, progress: Progress, label: str, counters: StreamStatistics) -> None:
        self._progress = progress
        self._label = label
        self._malformed = counters.malformed

    def sequence(self, frame: bytes) -> int | None:
        """A message's number; ``None`` if it has none."""
        try:
            return decode_sequence(frame)
        except MalformedEventError as error:
            self.count(error)
            return None

    def batch(self, payload: bytes) -> EventBatch | None:
        """A message's event; ``None`` if it can't be read."""
        try:
            return decode_batch(payload)
        except MalformedEventError as error:
            self.count(error)
            if error.kind == "integer-hashes":
                self._progress.give_up(
                    "its events carry hashes cut to 64 bits; "
                    "start it without VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
                )
            return None

    def count(self, error: MalformedEventError) -> None:
        """A message is not what vLLM sends. The first of each kind is logged."""
        self._malformed[error.kind] += 1
        if self._malformed[error.kind] == 1:
            logger.warning("%s: %s; further ones are only counted", self._label, error)
