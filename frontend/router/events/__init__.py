"""The KV events of workers, and what was missed of them."""

from frontend.router.events.feed import Feed, FeedMaker, StreamStatistics
from frontend.router.events.subscriber import EventSource, ZmqFeeds

__all__ = [
    "EventSource",
    "Feed",
    "FeedMaker",
    "StreamStatistics",
    "ZmqFeeds",
]
