"""Media in frames of the request plane, without shared memory or NIXL.

``inline`` carries processed tensors. ``reference``, which ``DYNAMO_DISABLE_NIXL_MM=1`` chooses,
carries the encoded file for the worker to process: nothing is fetched twice, and no second host
needs a fetch policy.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from vllm.multimodal.inputs import MultiModalKwargsItem

from common.errors import CorruptSegmentError, NoEncodedFormError
from common.identity import MmHash
from common.transfer.base import (
    MediaHandle,
    MediaSource,
    MmKwargsReceiver,
    MmKwargsSender,
    Received,
)
from common.transfer.codec import decode, encode
from common.transfer.metadata import InlineMetadata, ReferenceMetadata, Transport


class InlineSender(MmKwargsSender):
    """Sends the tensors' own memory as frames, without a copy."""

    transport: ClassVar[Transport] = "inline"

    def _send(self, mm_hash: MmHash, item: MultiModalKwargsItem) -> MediaHandle:
        encoded = encode(item)
        metadata = InlineMetadata(
            mm_hash=mm_hash,
            envelope_size=len(encoded.envelope),
            buffer_sizes=tuple(buffer.nbytes for buffer in encoded.buffers),
        )
        return MediaHandle(metadata, [encoded.envelope, *encoded.buffers])


class InlineReceiver(MmKwargsReceiver[InlineMetadata]):
    """Builds tensors over the frames."""

    transport: ClassVar[Transport] = "inline"
    metadata_type = InlineMetadata

    async def _receive(self, metadata: InlineMetadata, frames: Sequence[memoryview]) -> Received:
        end = metadata.first_frame + metadata.frame_count
        if end > len(frames):
            raise CorruptSegmentError(
                f"media item {metadata.mm_hash} should end with frame {end} of {len(frames)}"
            )
        envelope, *buffers = frames[metadata.first_frame : end]
        sizes = tuple(buffer.nbytes for buffer in buffers)
        if (envelope.nbytes, sizes) != (metadata.envelope_size, metadata.buffer_sizes):
            raise CorruptSegmentError(
                f"media item {metadata.mm_hash} came in frames of {envelope.nbytes} and "
                f"{sizes} bytes, but {metadata.envelope_size} and {metadata.buffer_sizes} "
                "were announced"
            )
        # torch needs writable memory. ZeroMQ's frames are; bytes objects, from tests, are not.
        writable = [
            memoryview(bytearray(each)) if each.readonly else each.cast("B") for each in buffers
        ]
        return Received(metadata.mm_hash, decode(envelope, writable))


Render = Callable[[MediaSource], Awaitable[tuple[MmHash, MultiModalKwargsItem]]]
"""Decodes and processes a medium; gives its hash, within its partition, and tensors."""


class ReferenceSender(MmKwargsSender):
    """Sends the encoded medium; nothing is held for it."""

    transport: ClassVar[Transport] = "reference"

    def send_encoded(self, mm_hash: MmHash, source: MediaSource) -> MediaHandle:
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

    def _send(self, mm_hash: MmHash, item: MultiModalKwargsItem) -> MediaHandle:
        raise NoEncodedFormError(f"media item {mm_hash} has no encoded form that stands for it")


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
