"""The KV events of workers, and what was missed of them."""

from frontend.router.events.progress import StreamStatistics
from frontend.router.events.subscriber import ZmqFeeds

__all__ = ["StreamStatistics", "ZmqFeeds"]
