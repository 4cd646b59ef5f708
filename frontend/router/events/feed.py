"""What the router asks of whatever keeps its indexes in step with a worker.

``subscriber.py`` does it over ZMQ; tests and simulations do it without sockets.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from frontend.router.index import BlockIndexes, IndexState
from frontend.router.worker import RoutableWorker


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


class Feed(Protocol):
    """Follows the cache of one incarnation of one worker."""

    def start(self) -> None:
        """Begin. Must not wait for the worker."""

    async def close(self) -> None:
        """End. Nothing is applied from the call on, also if it is cancelled."""

    def state(self, rank: int) -> IndexState:
        """How far the index of a rank can be trusted."""

    def served(self, rank: int, routed_at: float) -> None:
        """A request that must have stored blocks ended on a rank.

        Args:
            routed_at: when it was routed, in monotonic seconds.
        """

    def emptied(self, at: float) -> None:
        """The worker had its blocks forgotten, on all ranks.

        Args:
            at: when, by its clock, in seconds since the epoch; 0 for never.
        """

    def tick(self, now: float) -> None:
        """Look at the clock; called a few times a second.

        Args:
            now: monotonic seconds.
        """

    def statistics(self) -> dict[int, StreamStatistics]:
        """Counters per rank."""


class FeedMaker(Protocol):
    """Makes the feeds of a router."""

    def feed(self, worker: RoutableWorker, indexes: BlockIndexes) -> Feed:
        """A feed for a worker whose targets are registered, not yet started."""

    def close(self) -> None:
        """Free what feeds share. All of them are closed."""
