"""Follow the KV events of workers, and replay missed ones."""

from frontend.router.events.progress import StreamStatistics
from frontend.router.events.subscriber import ZmqFeeds
