"""Decoded media kept for the next request, least recently used ones dropped first.

Found by what the encoded bytes are, never by where they came from, so a changed
picture under an old URL can't be answered with the old one.
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
class CacheStatistics:
    """How full the cache is."""

    contents: int
    bytes_used: int
    budget_bytes: int


@dataclass(frozen=True)
class _Entry:
    content: Content
    nbytes: int
    decoded: dict[Mode, Any] = field(default_factory=dict)


class MediaCache:
    """Encoded bytes with what they decode to. For one event loop."""

    def __init__(self, budget_bytes: int) -> None:
        """
        Args:
            budget_bytes: most bytes of encoded and decoded media kept; 0 keeps nothing.
        """
        self._budget = budget_bytes
        self._entries: Lru[Digest, _Entry] = Lru(budget_bytes, lambda entry: entry.nbytes)

    def statistics(self) -> CacheStatistics:
        """How full the cache is."""
        return CacheStatistics(len(self._entries), self._entries.weight, self._budget)

    def content(self, digest: Digest) -> Content | None:
        """The encoded bytes of that digest, if they are here."""
        entry = self._entries.peek(digest)
        return None if entry is None else entry.content

    def get(self, digest: Digest, mode: Mode) -> Any:
        """What those bytes decode to in that mode, None if that isn't here.

        It belongs to the cache: hand out a copy.
        """
        entry = self._entries.get(digest)
        return None if entry is None else entry.decoded.get(mode)

    def add(self, content: Content, mode: Mode, decoded: Any) -> bool:
        """Keep a decoded medium, which belongs to the cache from now on.

        Returns:
            Whether it was kept: not if it is larger than the whole cache.
        """
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
        # A copy: what is reserved for a content lasts as long as that object.
        return self._entries.peek(content.digest) or _Entry(replace(content), len(content.data))

    def _put(self, entry: _Entry) -> None:
        self._entries.put(entry.content.digest, entry)
        MEDIA_CACHE_BYTES.set(self._entries.weight)

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        MEDIA_CACHE_BYTES.set(0)


class EntityTags:
    """Strong entity tags of contents that are in the cache, by the URL that gave them.

    With its tag a URL is asked for again, but its bytes are sent only if they have changed.
    """

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
