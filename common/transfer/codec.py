"""Processed media item to bytes and back: one small envelope plus the tensors' own memory.

The envelope is vLLM's msgpack form of the item. Nothing here moves bytes: where they
lie meanwhile is the transports' business.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW, MsgpackEncoder

from common.errors import CorruptSegmentError, UnsupportedItemError
from common.transfer.segment import Buffer

INLINE_BELOW: Final = 256
"""Tensors of fewer bytes ride inside the envelope. Fixed, because vLLM's default comes
from an environment variable that may differ between two processes."""

MAX_DIMENSIONS: Final = 16
MAX_NESTING: Final = 8

# The names that vLLM's encoder writes, and no other attribute of torch.
_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name)
    for name in (
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    )
}


@dataclass(frozen=True)
class EncodedItem:
    """An item as bytes.

    Attributes:
        envelope: msgpack; names, dtypes, shapes and all tensors below :data:`INLINE_BELOW`.
        buffers: raw contiguous bytes of the other tensors, in the order in which the
            envelope counts them, from 1. They alias the tensors' memory.
    """

    envelope: bytes
    buffers: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes in envelope and buffers together."""
        return len(self.envelope) + sum(buffer.nbytes for buffer in self.buffers)


class _BatchedField(msgspec.Struct, forbid_unknown_fields=True):
    keep_on_cpu: bool = False


class _SharedField(msgspec.Struct, forbid_unknown_fields=True):
    batch_size: int
    keep_on_cpu: bool = False


class _FlatField(msgspec.Struct, forbid_unknown_fields=True):
    slices: list[Any]
    dim: int = 0
    keep_on_cpu: bool = False


class _Element(msgspec.Struct, forbid_unknown_fields=True):
    """One field of an item as it stands in the envelope, still unchecked inside."""

    data: Any
    field: tuple[str, dict[str, Any]]


class _TensorsOnlyEncoder(MsgpackEncoder):
    """vLLM's encoder without its way out into pickle, which an environment variable opens."""

    def enc_hook(self, obj: Any) -> Any:
        if isinstance(obj, MultiModalKwargsItem | slice):
            return super().enc_hook(obj)
        raise UnsupportedItemError(
            f"a media item holds a {type(obj).__name__}; only tensors, lists of tensors "
            "and numbers can be sent to a worker"
        )


def encode(item: MultiModalKwargsItem) -> EncodedItem:
    """Give an item's bytes without copying its contiguous CPU tensors.

    The buffers alias those tensors: don't change them before the bytes were sent.
    Safe to call from several threads at once.

    Raises:
        UnsupportedItemError: the item holds more than tensors, lists of them and numbers.
    """
    # A new encoder each time: it keeps state while it encodes, and costs a microsecond.
    encoder = _TensorsOnlyEncoder(size_threshold=INLINE_BELOW)
    try:
        envelope, *buffers = encoder.encode(item)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedItemError(f"a media item can't be sent to a worker: {error}") from error
    return EncodedItem(bytes(envelope), [memoryview(buffer).cast("B") for buffer in buffers])


def decode(envelope: Buffer, buffers: Sequence[memoryview]) -> MultiModalKwargsItem:
    """Build an item whose larger tensors lie in ``buffers``, without a copy.

    Args:
        envelope: what :func:`encode` gave.
        buffers: its buffers in order, writable and contiguous; they must stay unchanged as
            long as the item is in use.

    Raises:
        CorruptSegmentError: the envelope is not one, or does not fit the buffers. Nothing
            an envelope says can run code or reach outside the buffers.
    """
    reader = _EnvelopeReader(buffers)
    try:
        elements = msgspec.msgpack.Decoder(
            dict[str, _Element], ext_hook=_accept_raw_view_only
        ).decode(envelope)
        item = MultiModalKwargsItem(
            {name: reader.element(element) for name, element in elements.items()}
        )
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
        # torch refuses a size it can't count with this one.
        RuntimeError,
        OverflowError,
    ) as error:
        raise CorruptSegmentError(f"a media item's envelope is unreadable: {error}") from error
    reader.expect_all_used()
    return item


def _accept_raw_view_only(code: int, data: memoryview) -> memoryview:
    if code != CUSTOM_TYPE_RAW_VIEW:
        raise CorruptSegmentError(f"a media item's envelope holds extension type {code}")
    return data


class _EnvelopeReader:
    """Checks each value of an envelope and gives what it stands for."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._used = [False] * len(buffers)

    def expect_all_used(self) -> None:
        if not all(self._used):
            raise CorruptSegmentError(
                f"a media item came with {len(self._used)} buffers but its envelope "
                f"uses {sum(self._used)}"
            )

    def element(self, element: _Element) -> MultiModalFieldElem:
        data = None if element.data is None else self._tensors(element.data, MAX_NESTING)
        return MultiModalFieldElem(data=data, field=_field(*element.field))

    def _tensors(self, value: Any, depth: int) -> Any:
        if isinstance(value, int | float):
            return value
        if not isinstance(value, list):
            raise CorruptSegmentError(
                f"a media item's envelope holds a {type(value).__name__} in place of a tensor"
            )
        if value and isinstance(value[0], str):
            return self._tensor(value)
        if depth == 0:
            raise CorruptSegmentError(f"tensors are nested more than {MAX_NESTING} deep")
        return [self._tensors(each, depth - 1) for each in value]

    def _tensor(self, value: list[Any]) -> torch.Tensor:
        if len(value) != 3:
            raise CorruptSegmentError(f"a tensor is described by {len(value)} values, not 3")
        dtype = _DTYPES.get(value[0])
        if dtype is None:
            raise CorruptSegmentError(f"a tensor's dtype is {value[0]!r}")
        shape = _shape(value[1])
        source, owned_by_caller = self._bytes_of(value[2])
        expected = math.prod(shape) * dtype.itemsize
        if source.nbytes != expected:
            raise CorruptSegmentError(
                f"a tensor of shape {shape} and dtype {value[0]} needs {expected} bytes "
                f"but {source.nbytes} came"
            )
        if expected == 0:
            return torch.empty(shape, dtype=dtype)
        # Small tensors lie inside the read-only envelope, unaligned: they get memory of
        # their own.
        raw = torch.frombuffer(source if owned_by_caller else bytearray(source), dtype=torch.uint8)
        return raw.view(dtype).view(shape)

    def _bytes_of(self, where: Any) -> tuple[memoryview, bool]:
        if isinstance(where, memoryview):
            return where, False
        if type(where) is not int or not 1 <= where <= len(self._buffers):
            raise CorruptSegmentError(
                f"a tensor refers to buffer {where!r} of {len(self._buffers)}"
            )
        if self._used[where - 1]:
            raise CorruptSegmentError(f"two tensors refer to buffer {where}")
        self._used[where - 1] = True
        return self._buffers[where - 1], True


def _shape(value: Any) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > MAX_DIMENSIONS
        or not all(type(size) is int and size >= 0 for size in value)
    ):
        raise CorruptSegmentError(f"a tensor's shape is {value!r:.100}")
    return tuple(value)


def _field(name: str, arguments: dict[str, Any]) -> BaseMultiModalField:
    """The field object, through vLLM's public factories and only the three known ones.

    The modality given to a factory does not become part of the field.
    """
    match name:
        case "batched":
            batched = msgspec.convert(arguments, _BatchedField)
            config = MultiModalFieldConfig.batched("", keep_on_cpu=batched.keep_on_cpu)
        case "shared":
            shared = msgspec.convert(arguments, _SharedField)
            config = MultiModalFieldConfig.shared(
                "", shared.batch_size, keep_on_cpu=shared.keep_on_cpu
            )
        case "flat":
            flat = msgspec.convert(arguments, _FlatField)
            config = MultiModalFieldConfig.flat(
                "",
                [_slices(each) for each in flat.slices],
                dim=flat.dim,
                keep_on_cpu=flat.keep_on_cpu,
            )
        case _:
            raise CorruptSegmentError(f"a media item's field is of kind {name!r:.100}")
    return config.field


def _slices(value: Any) -> Any:
    """A slice, or the tuple of slices (one per dimension) that a field with ``dim > 0`` has."""
    if not isinstance(value, list):
        raise CorruptSegmentError(f"a slice is given as {value!r:.100}")
    if value and isinstance(value[0], list):
        return tuple(_slice(each) for each in value)
    return _slice(value)


def _slice(value: Any) -> slice:
    if (
        not isinstance(value, list)
        or len(value) != 3
        or not all(part is None or type(part) is int for part in value)
    ):
        raise CorruptSegmentError(f"a slice is given as {value!r:.100}")
    return slice(*value)
