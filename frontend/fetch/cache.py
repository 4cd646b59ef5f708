"""LRU cache of decoded media.

Keyed by the digest of the encoded bytes, never by origin, so a changed picture under an old URL is
never answered with the old one.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from blake3 import blake3
from yarl import URL

from common.lru import Lru
from common.media.cache_partition import SHARED, Partition
from common.observability.telemetry import MEDIA_CACHE_BYTES
from frontend.fetch.content import Content, Digest, Mode
from frontend.fetch.decoded import weight

MAX_URLS: Final = 10_000
"""URLs whose entity tag is remembered."""


@dataclass(frozen=True)
class _Entry:
    content: Content
    nbytes: int
    decoded: dict[Mode, Any] = field(default_factory=dict)


class MediaCache:
    """Encoded bytes with their decoded forms. For one event loop."""

    def __init__(self, budget_bytes: int) -> None:
        """``budget_bytes`` limits encoded and decoded media together; 0 keeps nothing."""
        self._budget = budget_bytes
        self._entries: Lru[Digest, _Entry] = Lru(budget_bytes, lambda entry: entry.nbytes)

    def content(self, digest: Digest) -> Content | None:
        entry = self._entries.peek(digest)
        return None if entry is None else entry.content

    def get(self, digest: Digest, mode: Mode) -> Any:
        """Return the decoded medium, or None. It belongs to the cache: hand out a copy."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.decoded.get(mode)

    def add(self, content: Content, mode: Mode, decoded: Any) -> bool:
        """Keep a decoded medium, which belongs to the cache from now on; return whether it fits."""
        nbytes = weight(decoded)
        if nbytes is None or nbytes + len(content.data) > self._budget:
            return False
        entry = self._entry(content)
        if mode not in entry.decoded:
            more = {**entry.decoded, mode: decoded}
            entry = replace(entry, nbytes=entry.nbytes + nbytes, decoded=more)
        self._put(entry)
        return content.digest in self._entries

    def keep(self, content: Content) -> None:
        """Keep encoded bytes by themselves, if they fit."""
        if len(content.data) <= self._budget:
            self._put(self._entry(content))

    def _entry(self, content: Content) -> _Entry:
        # A copy: a reservation lasts as long as the content object that it was made for.
        return self._entries.peek(content.digest) or _Entry(replace(content), len(content.data))

    def _put(self, entry: _Entry) -> None:
        self._entries.put(entry.content.digest, entry)
        MEDIA_CACHE_BYTES.set(self._entries.weight)

    def clear(self) -> None:
        self._entries.clear()
        MEDIA_CACHE_BYTES.set(0)


class EntityTags:
    """Strong entity tags of cached contents, by URL.

    With its tag a URL is requested again, but its bytes are sent only if they have changed.
    """

    def __init__(self, cache: MediaCache) -> None:
        self._cache = cache
        # By the URL's digest: URLs hold secrets and have thousands of characters.
        self._tags: Lru[bytes, tuple[str, Digest]] = Lru(MAX_URLS)

    def remember(
        self, url: URL, etag: str, content: Content, partition: Partition = SHARED
    ) -> None:
        self._tags.put(_key(url, partition), (etag, content.digest))

    def recall(self, url: URL, partition: Partition = SHARED) -> tuple[str, Content] | None:
        """Return a URL's tag and content, if the content is still cached."""
        known = self._tags.get(_key(url, partition))
        if known is None:
            return None
        etag, digest = known
        content = self._cache.content(digest)
        return None if content is None else (etag, content)


def _key(url: URL, partition: Partition) -> bytes:
    return blake3(f"{partition} {url}".encode()).digest()
