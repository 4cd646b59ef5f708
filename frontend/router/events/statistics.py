"""What is counted of a stream."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class StreamStatistics:
    """Counters of one stream since start; each part of a stream counts what it sees.

    Attributes:
        batches: event batches applied.
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
