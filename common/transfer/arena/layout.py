"""Layout of an arena: a head that proves its identity to a worker, and segments with verifiable
headers.

Pure layout, no shared memory: the same rules hold for mapped and copied bytes. A segment:

 0            64                                        (each part 64-byte aligned)
 | header     | envelope ... | buffer 1 ... | buffer 2 ...
"""

import hashlib
import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from common.errors import ArenaUnavailableError, CorruptSegmentError, StaleSegmentError
from common.identity import MmHash

NAME_PATTERN: Final = r"mmrouter-arena-(\d{1,10})-(\d{1,20})-([0-9a-f]{16})"

SEGMENT_ALIGNMENT: Final = mmap.PAGESIZE
"""A page: no two segments share one, so a reader can drop its private copies of a
segment's pages without touching a neighbour's."""

SEGMENTS_START: Final = SEGMENT_ALIGNMENT
"""Where the first segment begins; the head has the page before it to itself."""

NONCE_SIZE: Final = 32

# magic, generation, bytes of the whole arena, nonce
_HEAD: Final = struct.Struct(f"<8sQQ{NONCE_SIZE}s")
_MAGIC: Final = b"mmraren1"

HEAD_SIZE: Final = _HEAD.size  # bytes to read for :func:`check_head`


class ArenaOffer(BaseModel):
    """A frontend's description of its arena, for workers.

    Attributes:
        name: file name in the shared-memory directory; a name, never a path.
        size: bytes.
        generation: random number of this arena.
        nonce: hexadecimal; in the head of the arena, and key of the segments' tags.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    size: Annotated[int, Field(gt=SEGMENTS_START, lt=2**63)]
    generation: Annotated[int, Field(ge=0, lt=2**64)]
    nonce: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * NONCE_SIZE}}}$")]

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.nonce)


def pack_head(offer: ArenaOffer) -> bytes:
    return _HEAD.pack(_MAGIC, offer.generation, offer.size, offer.key)


def check_head(arena: memoryview, offer: ArenaOffer) -> None:
    """Check that memory (its first :data:`HEAD_SIZE` bytes) is the offered arena. Raises
    ArenaUnavailableError: it belongs to another IPC namespace or host, for example."""
    if bytes(arena[: _HEAD.size]) != pack_head(offer):
        raise ArenaUnavailableError(
            f"{offer.name} here is not the frontend's arena: its probe does not match"
        )


Buffer: TypeAlias = bytes | memoryview

PART_ALIGNMENT: Final = 64  # a cache line, and the alignment of the widest vector loads

HEADER_SIZE: Final = 64

# magic, generation, length of the segment, digest of the mm_hash, size of the envelope,
# CRC-32 of the envelope; then the tag.
_FIELDS: Final = struct.Struct("<8sQQ16sII")
_TAG_SIZE: Final = HEADER_SIZE - _FIELDS.size
_LIVE: Final = b"mmrseg1\0"
_RECLAIMED: Final = b"mmrgone\0"


def aligned(size: int, alignment: int = PART_ALIGNMENT) -> int:
    """Round ``size`` up to a multiple of ``alignment``, a power of two."""
    return (size + alignment - 1) & -alignment


@dataclass(frozen=True)
class EncodedItem:
    """An item as bytes, see :mod:`common.transfer.codec`.

    Attributes:
        envelope: msgpack; names, dtypes, shapes and the small tensors.
        buffers: raw contiguous bytes of the other tensors, numbered from 1 in the envelope. They
            alias the tensors' memory and keep it alive.
    """

    envelope: bytes
    buffers: list[memoryview]


@dataclass(frozen=True)
class SegmentLayout:
    """Sizes and offsets of a segment's parts, in bytes from its start."""

    envelope_size: int
    buffer_sizes: tuple[int, ...]

    @cached_property
    def buffer_offsets(self) -> tuple[int, ...]:
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
        """Return views of envelope and buffers in a segment of at least :attr:`length` bytes."""
        return segment[HEADER_SIZE : HEADER_SIZE + self.envelope_size], [
            segment[start : start + size]
            for start, size in zip(self.buffer_offsets, self.buffer_sizes, strict=True)
        ]


def live_header(
    key: bytes, generation: int, mm_hash: MmHash, layout: SegmentLayout, envelope: Buffer
) -> bytes:
    """Return the header of a complete segment. The arena's key makes its tag unforgeable: pixels at
    a former header's place never pass for one."""
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
    """Return a header that marks the segment as reclaimed, for late readers."""
    fields = _FIELDS.pack(_RECLAIMED, generation, 0, b"", 0, 0)
    return fields + _tag(key, fields)


def check_header(
    header: Buffer, key: bytes, generation: int, mm_hash: MmHash, layout: SegmentLayout
) -> int:
    """Check a header of :data:`HEADER_SIZE` bytes; return the envelope's CRC-32. Raises
    StaleSegmentError: the segment was reclaimed. Raises CorruptSegmentError: no such header."""
    # One copy first: the owner may overwrite the original during the check.
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
    """Check an envelope's CRC-32. Raises CorruptSegmentError: it differs from the header's."""
    if zlib.crc32(envelope) != crc:
        raise CorruptSegmentError(f"the envelope of media item {mm_hash} is damaged")


def write_parts(segment: memoryview, layout: SegmentLayout, parts: Sequence[Buffer]) -> None:
    """Copy envelope and buffers (without the GIL) to their places, not the header."""
    envelope, buffers = layout.split(segment)
    for target, source in zip([envelope, *buffers], parts, strict=True):
        copy_bytes(target, source)


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy equally long buffers without the GIL."""
    # Slice assignment would hold the GIL: 26 MB stall an event loop for milliseconds. NumPy
    # releases it and is as fast as memcpy.
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _digest(mm_hash: MmHash) -> bytes:
    return hashlib.blake2b(mm_hash.encode(), digest_size=16).digest()


def _tag(key: bytes, fields: bytes) -> bytes:
    return hashlib.blake2b(fields, key=key, digest_size=_TAG_SIZE).digest()
