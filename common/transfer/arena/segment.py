"""What a segment looks like: header, envelope and buffers, and how a reader trusts it.

Pure layout, no shared memory: the same rules hold for mapped and for copied bytes.

    0            64                                        (each part 64-byte aligned)
    | header     | envelope ... | buffer 1 ... | buffer 2 ...
"""

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np

from common.errors import CorruptSegmentError, StaleSegmentError
from common.identity import MmHash

Buffer: TypeAlias = bytes | memoryview

PART_ALIGNMENT: Final = 64
"""A cache line, and what the widest vector loads want."""

HEADER_SIZE: Final = 64

# magic, generation, length of the segment, digest of the mm_hash, size of the envelope,
# CRC-32 of the envelope; then the tag.
_FIELDS: Final = struct.Struct("<8sQQ16sII")
_TAG_SIZE: Final = HEADER_SIZE - _FIELDS.size
_LIVE: Final = b"mmrseg1\0"
_RECLAIMED: Final = b"mmrgone\0"


def aligned(size: int, alignment: int = PART_ALIGNMENT) -> int:
    """``size`` rounded up to a multiple of ``alignment``, a power of two."""
    return (size + alignment - 1) & -alignment


@dataclass(frozen=True)
class EncodedItem:
    """An item as bytes, see :mod:`common.transfer.codec`.

    Attributes:
        envelope: msgpack; names, dtypes, shapes and the small tensors.
        buffers: raw contiguous bytes of the other tensors, in the order in which the
            envelope counts them, from 1. They alias the tensors' memory and keep it alive.
    """

    envelope: bytes
    buffers: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes in envelope and buffers together."""
        return len(self.envelope) + sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True)
class SegmentLayout:
    """Where the parts of a segment lie, in bytes from its start.

    Attributes:
        envelope_size: bytes of the envelope.
        buffer_sizes: bytes of each buffer.
    """

    envelope_size: int
    buffer_sizes: tuple[int, ...]

    @cached_property
    def buffer_offsets(self) -> tuple[int, ...]:
        """Start of each buffer."""
        offsets = []
        end = HEADER_SIZE + self.envelope_size
        for size in self.buffer_sizes:
            start = aligned(end)
            offsets.append(start)
            end = start + size
        return tuple(offsets)

    @cached_property
    def length(self) -> int:
        """Bytes from the start of the header to the end of the last part."""
        if not self.buffer_sizes:
            return HEADER_SIZE + self.envelope_size
        return self.buffer_offsets[-1] + self.buffer_sizes[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of envelope and buffers, without header and padding."""
        return self.envelope_size + sum(self.buffer_sizes)

    def split(self, segment: memoryview) -> tuple[memoryview, list[memoryview]]:
        """Views of envelope and buffers.

        Args:
            segment: at least :attr:`length` bytes.
        """
        return segment[HEADER_SIZE : HEADER_SIZE + self.envelope_size], [
            segment[start : start + size]
            for start, size in zip(self.buffer_offsets, self.buffer_sizes, strict=True)
        ]


def live_header(
    key: bytes, generation: int, mm_hash: MmHash, layout: SegmentLayout, envelope: Buffer
) -> bytes:
    """Header of a segment that is complete.

    Args:
        key: secret of the arena. It makes the tag unforgeable, so that pixels which happen
            to lie where a header once was are never taken for one.
    """
    fields = _FIELDS.pack(
        _LIVE,
        generation,
        layout.length,
        _digest(mm_hash),
        layout.envelope_size,
        zlib.crc32(envelope),
    )
    return fields + _tag(key, fields)


def reclaimed_header(key: bytes, generation: int) -> bytes:
    """Header that tells late readers that the segment is gone."""
    fields = _FIELDS.pack(_RECLAIMED, generation, 0, b"", 0, 0)
    return fields + _tag(key, fields)


def check_header(
    header: Buffer, key: bytes, generation: int, mm_hash: MmHash, layout: SegmentLayout
) -> int:
    """Check that a header is the one its metadata was made for.

    Args:
        header: :data:`HEADER_SIZE` bytes.

    Returns:
        The CRC-32 that the envelope must have.

    Raises:
        StaleSegmentError: it belongs to another generation, so the segment was reclaimed.
        CorruptSegmentError: it never was such a header.
    """
    # One copy first: the owner may overwrite the original while it is looked at.
    header = bytes(header)
    fields, tag = header[: _FIELDS.size], header[_FIELDS.size :]
    magic, found, length, digest, envelope_size, envelope_crc = _FIELDS.unpack(fields)
    if magic != _LIVE or found != generation:
        raise StaleSegmentError(
            f"the segment of media item {mm_hash} was reclaimed: generation {generation} "
            "is no longer there"
        )
    if tag != _tag(key, fields):
        raise CorruptSegmentError(f"the segment header of media item {mm_hash} is damaged")
    if digest != _digest(mm_hash):
        raise CorruptSegmentError(f"the segment does not hold media item {mm_hash}")
    if (length, envelope_size) != (layout.length, layout.envelope_size):
        raise CorruptSegmentError(
            f"the segment of media item {mm_hash} has {length} bytes with an envelope of "
            f"{envelope_size}, but {layout.length} and {layout.envelope_size} were announced"
        )
    return int(envelope_crc)


def check_envelope(envelope: Buffer, crc: int, mm_hash: MmHash) -> None:
    """Check an envelope against the CRC-32 in its header.

    Raises:
        CorruptSegmentError: they differ.
    """
    if zlib.crc32(envelope) != crc:
        raise CorruptSegmentError(f"the envelope of media item {mm_hash} is damaged")


def write_parts(segment: memoryview, layout: SegmentLayout, parts: Sequence[Buffer]) -> None:
    """Copy envelope and buffers to their places; the header is left alone.

    The interpreter's lock is not held while a buffer is copied.

    Args:
        segment: at least ``layout.length`` writable bytes.
        parts: envelope, then the buffers, with the sizes of ``layout``.
    """
    envelope, buffers = layout.split(segment)
    for target, source in zip([envelope, *buffers], parts, strict=True):
        copy_bytes(target, source)


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy equally long buffers, letting other threads run meanwhile."""
    # Slice assignment would hold the interpreter's lock: 26 MB stall an event loop for
    # milliseconds. NumPy gives it up and is as fast as memcpy.
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _digest(mm_hash: MmHash) -> bytes:
    return hashlib.blake2b(mm_hash.encode(), digest_size=16).digest()


def _tag(key: bytes, fields: bytes) -> bytes:
    return hashlib.blake2b(fields, key=key, digest_size=_TAG_SIZE).digest()
