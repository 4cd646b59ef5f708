"""What is counted of a stream."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class StreamStatistics(NamedTuple):
    """Counters of one stream since start.

    Attributes:
        batches: event batches applied.
        duplicates: messages that a replay had already brought.
        gaps: losses noticed.
        replays: replays asked for.
        restarts: times the sequence started over.
        losses: times that events were lost for good.
        malformed: unreadable messages by kind.
        next_sequence: number expected next; ``None`` before the first event.
        lag_s: age of the last live event when it was applied, by the clocks of both hosts.
    """

    batches: int
    duplicates: int
    gaps: int
    replays: int
    restarts: int
    losses: int
    malformed: dict[str, int]
    next_sequence: int | None
    lag_s: float | None


@dataclass(slots=True)
class StreamCounters:
    """The same while they grow; each part of a stream counts what it sees."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    replays: int = 0
    restarts: int = 0
    losses: int = 0
    malformed: Counter[str] = field(default_factory=Counter)
    lag_s: float | None = None

    def statistics(self, next_sequence: int | None) -> StreamStatistics:
        """The counters as they stand."""
        return StreamStatistics(
            self.batches,
            self.duplicates,
            self.gaps,
            self.replays,
            self.restarts,
            self.losses,
            dict(self.malformed),
            next_sequence,
            self.lag_s,
        )
