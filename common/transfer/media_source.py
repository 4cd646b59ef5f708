"""A medium before processing, as its user sent it."""

from dataclasses import dataclass

from pydantic import JsonValue

from common.media.cache_partition import SHARED, Partition


@dataclass(frozen=True)
class MediaSource:
    """A medium before processing.

    Attributes:
        modality: vLLM's name of it.
        encoded: the file as fetched, a JPEG for example.
        mm_processor_kwargs: what the request told the HF processor.
        media_io_kwargs: what the request told the decoder.
        partition: whose it is.
    """

    modality: str
    encoded: bytes
    mm_processor_kwargs: dict[str, JsonValue]
    media_io_kwargs: dict[str, JsonValue]
    partition: Partition = SHARED
