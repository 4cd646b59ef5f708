"""The KV events of workers, and what was missed of them."""

from frontend.router.events.feed import Feed, FeedMaker
from frontend.router.events.figures import show_figures
from frontend.router.events.statistics import StreamStatistics
from frontend.router.events.subscriber import EventSource, ZmqFeeds

__all__ = [
    "EventSource",
    "Feed",
    "FeedMaker",
    "StreamStatistics",
    "ZmqFeeds",
    "show_figures",
]
