"""Media as fetched, by hash, for workers that process them themselves."""

from collections import OrderedDict

from common.identity import MmHash
from common.media.cache_partition import Partition
from common.transfer.media_source import MediaSource
from frontend.processing.batch import MediaOptions
from frontend.processing.prompt_media import Shown

BUDGET_BYTES = 1 << 30
"""Encoded media kept. A request whose source is gone is served inline."""


def source_of(shown: Shown, options: MediaOptions, partition: Partition) -> MediaSource:
    """A medium for a worker that processes it itself."""
    return MediaSource(
        shown.modality,
        shown.medium.content.data,
        dict(options.mm_processor_kwargs),  # type: ignore[arg-type] # JSON in a request
        dict(options.media_io_kwargs),  # type: ignore[arg-type] # likewise
        partition,
    )


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
