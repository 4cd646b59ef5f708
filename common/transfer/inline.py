"""No shared memory, no NIXL: the bytes ride on the request plane as frames of their own."""

from collections.abc import Sequence
from typing import ClassVar

from vllm.multimodal.inputs import MultiModalKwargsItem

from common.errors import CorruptSegmentError
from common.identity import MmHash
from common.transfer.base import MediaHandle, MmKwargsReceiver, MmKwargsSender, Received
from common.transfer.codec import decode, encode
from common.transfer.metadata import InlineMetadata, Transport


class InlineSender(MmKwargsSender):
    """Gives the tensors' own memory as frames; nothing is copied here."""

    transport: ClassVar[Transport] = "inline"

    def _send(self, mm_hash: MmHash, item: MultiModalKwargsItem) -> MediaHandle:
        encoded = encode(item)
        metadata = InlineMetadata(
            mm_hash=mm_hash,
            envelope_size=len(encoded.envelope),
            buffer_sizes=tuple(buffer.nbytes for buffer in encoded.buffers),
        )
        return MediaHandle(metadata, [encoded.envelope, *encoded.buffers])

    def close(self) -> None:
        """Nothing to free."""


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
        return Received(
            metadata.mm_hash, decode(envelope, [_writable(buffer) for buffer in buffers])
        )

    async def close(self) -> None:
        """Nothing to free."""


def _writable(buffer: memoryview) -> memoryview:
    # torch needs writable memory. ZeroMQ's frames are; bytes objects, from tests, are not.
    return memoryview(bytearray(buffer)) if buffer.readonly else buffer.cast("B")
