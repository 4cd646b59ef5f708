"""Media as fetched, by hash, for workers that process them themselves."""

from collections import OrderedDict

from common.identity import MmHash
from common.transfer.media_source import MediaSource

BUDGET_BYTES = 1 << 30
"""Encoded media kept. A request whose source is gone is served inline."""


class MediaSources:
    """The media that were shown last. For one event loop."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget = budget_bytes
        self._sources: OrderedDict[MmHash, MediaSource] = OrderedDict()
        self._bytes = 0

    def get(self, mm_hash: MmHash) -> MediaSource | None:
        """The medium of that hash, None if it came without encoded bytes or long ago."""
        return self._sources.get(mm_hash)

    def keep(self, mm_hash: MmHash, source: MediaSource) -> None:
        """Keep a medium, dropping others that were shown long ago."""
        previous = self._sources.pop(mm_hash, None)
        self._bytes += len(source.encoded) - (len(previous.encoded) if previous else 0)
        self._sources[mm_hash] = source
        while self._bytes > self._budget and len(self._sources) > 1:
            _, oldest = self._sources.popitem(last=False)
            self._bytes -= len(oldest.encoded)
