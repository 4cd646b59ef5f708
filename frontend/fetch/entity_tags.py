"""Which content a server gave under which URL and entity tag.

With that a URL is asked for again, but its bytes are sent only if they have changed.
"""

from blake3 import blake3
from yarl import URL

from common.cache_partition import SHARED, Partition
from common.lru import Lru
from frontend.fetch.cache import MediaCache
from frontend.fetch.content import Content, Digest

MAX_URLS = 10_000


class EntityTags:
    """Strong entity tags of contents that are in the cache."""

    def __init__(self, cache: MediaCache) -> None:
        self._cache = cache
        # By the URL's digest: URLs hold secrets and have thousands of characters.
        self._tags: Lru[bytes, tuple[str, Digest]] = Lru(MAX_URLS)

    def remember(
        self, url: URL, etag: str, content: Content, partition: Partition = SHARED
    ) -> None:
        """A server gave that content under that tag."""
        self._tags.put(_key(url, partition), (etag, content.digest))

    def recall(self, url: URL, partition: Partition = SHARED) -> tuple[str, Content] | None:
        """Tag and content that a URL had, if the content is still at hand."""
        known = self._tags.get(_key(url, partition))
        if known is None:
            return None
        etag, digest = known
        content = self._cache.content(digest)
        return None if content is None else (etag, content)


def _key(url: URL, partition: Partition) -> bytes:
    return blake3(f"{partition} {url}".encode()).digest()
