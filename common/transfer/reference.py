"""No transfer at all: the medium as its user sent it, which the worker processes itself.

What ``DYNAMO_DISABLE_NIXL_MM=1`` chooses. The encoded bytes that the frontend fetched
ride on the request plane, so nothing is fetched twice and no second host needs a
policy for it.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import JsonValue
from vllm.multimodal.inputs import MultiModalKwargsItem

from common.cache_partition import SHARED, Partition
from common.errors import CorruptSegmentError
from common.identity import MmHash
from common.transfer.base import MediaHandle, MmKwargsReceiver, Received
from common.transfer.metadata import ReferenceMetadata, Transport


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


Render = Callable[[MediaSource], Awaitable[tuple[MmHash, MultiModalKwargsItem]]]
"""Decodes and processes a medium; gives its hash, within its partition, and tensors."""


def refer(mm_hash: MmHash, source: MediaSource) -> MediaHandle:
    """A handle of the encoded medium; nothing is held for it."""
    metadata = ReferenceMetadata(
        mm_hash=mm_hash,
        envelope_size=len(source.encoded),
        buffer_sizes=(),
        modality=source.modality,
        mm_processor_kwargs=source.mm_processor_kwargs,
        media_io_kwargs=source.media_io_kwargs,
        partition=source.partition,
    )
    return MediaHandle(metadata, [source.encoded])


class ReferenceReceiver(MmKwargsReceiver[ReferenceMetadata]):
    """Processes media in the worker."""

    transport: ClassVar[Transport] = "reference"
    metadata_type = ReferenceMetadata

    def __init__(self, render: Render) -> None:
        super().__init__()
        self._render = render

    async def _receive(self, metadata: ReferenceMetadata, frames: Sequence[memoryview]) -> Received:
        if metadata.first_frame >= len(frames):
            raise CorruptSegmentError(f"media item {metadata.mm_hash} came without its frame")
        source = MediaSource(
            metadata.modality,
            bytes(frames[metadata.first_frame]),
            metadata.mm_processor_kwargs,
            metadata.media_io_kwargs,
            metadata.partition,
        )
        mm_hash, item = await self._render(source)
        if mm_hash != metadata.mm_hash:
            raise CorruptSegmentError(
                f"media item {metadata.mm_hash} became {mm_hash} when processed here"
            )
        return Received(metadata.mm_hash, item)

    async def close(self) -> None:
        """Nothing to free."""
