"""What ``/metrics`` says of KV events: asked of the feeds when somebody reads it."""

from collections.abc import Iterator, Mapping
from functools import partial

from common.identity import WorkerId
from common.observability.live_metrics import Row
from common.observability.telemetry import KV_EVENTS
from frontend.router.events.feed import Feed


def show_figures(feeds: Mapping[WorkerId, Feed]) -> None:
    """Show what feeds count from now on.

    Args:
        feeds: those of the fleet, a live view.
    """
    KV_EVENTS.set_function(partial(_rows, feeds))


def _rows(feeds: Mapping[WorkerId, Feed]) -> Iterator[Row]:
    for worker_id, feed in dict(feeds).items():
        for rank, counted in feed.statistics().items():
            yield Row(
                (worker_id, str(rank)),
                (
                    counted.batches,
                    counted.gaps,
                    counted.replays,
                    counted.losses,
                    counted.restarts,
                    sum(counted.malformed.values()),
                    counted.lag_s,
                ),
            )
