"""What the router asks of whatever keeps its indexes in step with a worker.

``subscriber.py`` does it over ZMQ; tests and simulations do it without sockets.
"""

from typing import Protocol

from frontend.router.events.statistics import StreamStatistics
from frontend.router.index import BlockIndexes, IndexState
from frontend.router.worker import RoutableWorker


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
