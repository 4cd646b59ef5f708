"""Description of an item on the request plane in place of its tensors.

One model per transport, told apart by ``transport``; JSON on the wire.
"""

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
)

from common.bounded_json import JsonLimits, MalformedJsonError
from common.errors import CorruptSegmentError
from common.identity import MmHash
from common.media.cache_partition import SHARED, Partition
from common.transfer.arena import SegmentLayout

Transport: TypeAlias = Literal["shm", "nixl", "inline", "reference"]

MAX_BUFFERS: Final = 4096
"""Tensors of one item that have 256 bytes or more."""

MAX_ENVELOPE_BYTES: Final = 1 << 20
"""An honest envelope has some hundred bytes a tensor. One of 9.5 MB took 3 s to decode."""

_LIMITS: Final = JsonLimits(most_bytes=1 << 20, most_commas=2 * MAX_BUFFERS)

_Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
_Envelope: TypeAlias = Annotated[int, Field(ge=0, le=MAX_ENVELOPE_BYTES)]
_Generation: TypeAlias = Annotated[int, Field(ge=0, lt=2**64)]
_Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=255)]


class ItemMetadata(BaseModel):
    """Fields of every transport: the item, and the bytes of its envelope and each buffer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    mm_hash: Annotated[MmHash, Field(min_length=1, max_length=1024)]
    envelope_size: _Count
    buffer_sizes: Annotated[tuple[_Count, ...], Field(max_length=MAX_BUFFERS, strict=False)]

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def layout(self) -> SegmentLayout:
        """Layout of the item's segment, if it has one."""
        return SegmentLayout(self.envelope_size, self.buffer_sizes)


class ShmMetadata(ItemMetadata):
    """An item in a mapped arena: its header's offset from the start, and its generation."""

    envelope_size: _Envelope
    transport: Literal["shm"] = "shm"
    arena: _Name
    offset: _Count
    generation: _Generation


class NixlMetadata(ItemMetadata):
    """An item in an arena that the worker reads over NIXL. The hexadecimal checksum covers the
    whole segment, under the offer's key."""

    envelope_size: _Envelope
    transport: Literal["nixl"] = "nixl"
    agent: _Name
    offset: _Count
    generation: _Generation
    checksum: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class FramedMetadata(ItemMetadata):
    """An item in frames of the same message, from ``first_frame`` on."""

    first_frame: _Count = 0


class InlineMetadata(FramedMetadata):
    """One frame for the envelope, and one for each buffer."""

    envelope_size: _Envelope
    transport: Literal["inline"] = "inline"

    @property
    def frame_count(self) -> int:
        return 1 + len(self.buffer_sizes)


class ReferenceMetadata(FramedMetadata):
    """An encoded medium in a frame, with the request's options for the HF processor and the
    decoder. The partition is part of ``mm_hash``."""

    transport: Literal["reference"] = "reference"
    modality: _Name
    mm_processor_kwargs: dict[str, JsonValue]
    media_io_kwargs: dict[str, JsonValue]
    partition: Annotated[Partition, Field(max_length=64)] = SHARED


TransferMetadata: TypeAlias = Annotated[
    ShmMetadata | NixlMetadata | InlineMetadata | ReferenceMetadata,
    Field(discriminator="transport"),
]

_adapter: TypeAdapter[TransferMetadata] = TypeAdapter(TransferMetadata)


def encode_metadata(metadata: TransferMetadata) -> bytes:
    return _adapter.dump_json(metadata)


def decode_metadata(data: bytes | memoryview) -> TransferMetadata:
    """Parse metadata. Raises CorruptSegmentError: it is malformed, or a value is out of range."""
    try:
        return _LIMITS.read(_adapter, data)
    except MalformedJsonError as error:
        raise CorruptSegmentError(f"transfer metadata is malformed: {error}") from error
