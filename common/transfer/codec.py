"""Processed media item to bytes and back: a small envelope plus the tensors' own memory.

The envelope is msgpack of the types below only: no extension types, no names of classes or
functions, so it can run no code. vLLM's own encoding of items is unsuitable: an environment
variable opens it to pickle, on either side. Nothing here moves bytes; the transports do.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
import torch
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

from common.errors import CorruptSegmentError, UnsupportedItemError
from common.transfer.arena import Buffer, EncodedItem
from common.transfer.metadata import MAX_BUFFERS, MAX_ENVELOPE_BYTES

INLINE_BELOW: Final = 256  # tensors of fewer bytes ride inside the envelope
MAX_NESTING: Final = 8  # how deep lists of tensors may be nested

_DTYPES: Final[dict[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    )
}
_TORCH_ONLY: Final = frozenset(
    dtype for name, dtype in _DTYPES.items() if name == "bfloat16" or name.startswith("float8")
)
_DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class _Tensor(msgspec.Struct, array_like=True, tag="tensor", forbid_unknown_fields=True):
    """A tensor whose bytes are in buffer number ``buffer``, from 1, or inline if that is 0."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=16)]
    buffer: _Size
    content: bytes = b""


class _Nested(msgspec.Struct, array_like=True, tag="list", forbid_unknown_fields=True):
    members: "list[_Tensor | _Nested | bool | int | float]"


_Part: TypeAlias = _Tensor | _Nested | bool | int | float


class _Batched(msgspec.Struct, array_like=True, tag="batched", forbid_unknown_fields=True):
    keep_on_cpu: bool


class _Shared(msgspec.Struct, array_like=True, tag="shared", forbid_unknown_fields=True):
    keep_on_cpu: bool
    batch_size: int


_Slice: TypeAlias = tuple[int | None, int | None, int | None]


class _Flat(msgspec.Struct, array_like=True, tag="flat", forbid_unknown_fields=True):
    """``slices`` has a slice for each dimension if ``per_dimension``, else exactly one."""

    keep_on_cpu: bool
    dim: int
    per_dimension: bool
    slices: list[list[_Slice]]


class _Element(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    data: _Part | None
    field: _Batched | _Shared | _Flat


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(dict[str, _Element])


def encode(item: MultiModalKwargsItem) -> EncodedItem:
    """Encode an item without copying its contiguous CPU tensors; the buffers alias them until sent.
    Thread-safe. Raises UnsupportedItemError: the item holds other types than tensors, lists of them
    and numbers, or more of these than workers take."""
    buffers: list[memoryview] = []
    elements = {
        name: _Element(
            None if element.data is None else _data_of(element.data, buffers),
            _field_of(element.field),
        )
        for name, element in item.items()
    }
    try:
        encoded = EncodedItem(_encoder.encode(elements), buffers)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedItemError(f"a media item can't be sent to a worker: {error}") from error
    if len(encoded.envelope) > MAX_ENVELOPE_BYTES or len(buffers) > MAX_BUFFERS:
        raise UnsupportedItemError(
            f"a media item can't be sent to a worker: it has {len(buffers)} large tensors, and its "
            f"small ones and their names take {len(encoded.envelope)} bytes; {MAX_BUFFERS} and "
            f"{MAX_ENVELOPE_BYTES} are the most"
        )
    return encoded


def decode(envelope: Buffer, buffers: Sequence[memoryview]) -> MultiModalKwargsItem:
    """Build an item over its envelope and buffers, without a copy. Buffers must be writable and
    contiguous, and unchanged while the item is in use. Raises CorruptSegmentError: the envelope is
    malformed, or does not fit the buffers. It can neither run code nor reach outside the buffers.
    """
    unused = dict(enumerate(buffers, 1))
    try:
        item = MultiModalKwargsItem(
            {
                name: MultiModalFieldElem(
                    data=_read_data(element.data, unused, MAX_NESTING),
                    field=_read_field(element.field),
                )
                for name, element in _decoder.decode(envelope).items()
            }
        )
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
        OverflowError,
        # torch raises this for a size that overflows.
        RuntimeError,
    ) as error:
        raise CorruptSegmentError(f"a media item's envelope is unreadable: {error}") from error
    if unused:
        raise CorruptSegmentError(
            f"a media item came with {len(buffers)} buffers, of which its envelope leaves "
            f"{len(unused)} out"
        )
    return item


def _data_of(data: Any, buffers: list[memoryview]) -> _Part:
    if isinstance(data, torch.Tensor):
        return _tensor_of(data, buffers)
    if isinstance(data, bool | int | float):
        return data
    if isinstance(data, list | tuple):
        return _Nested([_data_of(each, buffers) for each in data])
    raise UnsupportedItemError(
        f"a media item holds a {type(data).__name__}; only tensors, lists of tensors and "
        "numbers can be sent to a worker"
    )


def _tensor_of(tensor: torch.Tensor, buffers: list[memoryview]) -> _Tensor:
    dtype = _DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise UnsupportedItemError(
            f"a media item holds a tensor of {tensor.dtype} with layout {tensor.layout}, "
            "which can't be sent to a worker"
        )
    shape = list(tensor.shape)
    content = _bytes_of(tensor.detach().cpu().contiguous())
    if content.nbytes < INLINE_BELOW:
        return _Tensor(dtype, shape, 0, content.tobytes())
    buffers.append(content)
    return _Tensor(dtype, shape, len(buffers))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # NumPy's views cost half of torch's, but it lacks some dtypes.
    if tensor.dtype in _TORCH_ONLY:
        tensor = tensor.view(-1).view(torch.uint8)
    return tensor.numpy().reshape(-1).view(np.uint8).data


def _field_of(field: BaseMultiModalField) -> _Batched | _Shared | _Flat:
    # Exact types: a subclass's additions would be lost.
    kind = type(field)
    if kind is MultiModalBatchedField:
        return _Batched(field.keep_on_cpu)
    if kind is MultiModalSharedField:
        return _Shared(field.keep_on_cpu, field.batch_size)
    if kind is MultiModalFlatField:
        per_dimension = bool(field.slices) and not isinstance(field.slices[0], slice)
        slices = field.slices if per_dimension else [[each] for each in field.slices]
        return _Flat(
            field.keep_on_cpu,
            field.dim,
            per_dimension,
            [[_slice_of(each) for each in several] for several in slices],
        )
    raise UnsupportedItemError(
        f"a media item has a field of kind {kind.__name__}, which can't be sent to a worker"
    )


def _slice_of(value: slice) -> _Slice:
    # Bounds may be tensors of one element.
    start, stop, step = (
        None if bound is None else int(bound) for bound in (value.start, value.stop, value.step)
    )
    return start, stop, step


def _read_data(data: _Part | None, unused: dict[int, memoryview], depth: int) -> Any:
    if isinstance(data, _Tensor):
        return _read_tensor(data, unused)
    if isinstance(data, _Nested):
        if depth == 0:
            raise CorruptSegmentError(f"tensors are nested more than {MAX_NESTING} deep")
        return [_read_data(each, unused, depth - 1) for each in data.members]
    return data


def _read_tensor(tensor: _Tensor, unused: dict[int, memoryview]) -> torch.Tensor:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise CorruptSegmentError(f"a tensor's dtype is {tensor.dtype!r:.100}")
    source: memoryview | bytearray
    if tensor.buffer:
        found = unused.pop(tensor.buffer, None)
        if found is None:
            raise CorruptSegmentError(
                f"a tensor refers to buffer {tensor.buffer}, which isn't there or is another's"
            )
        source, size = found, found.nbytes
    else:
        # Memory of its own: the envelope's is read-only and unaligned.
        source, size = bytearray(tensor.content), len(tensor.content)
    expected = math.prod(tensor.shape) * dtype.itemsize
    if size != expected:
        raise CorruptSegmentError(
            f"a tensor of shape {tensor.shape} and dtype {tensor.dtype} needs {expected} bytes "
            f"but {size} came"
        )
    if expected == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(source, dtype=dtype).view(tensor.shape)


def _read_field(field: _Batched | _Shared | _Flat) -> BaseMultiModalField:
    match field:
        case _Batched():
            return MultiModalBatchedField(keep_on_cpu=field.keep_on_cpu)
        case _Shared():
            return MultiModalSharedField(keep_on_cpu=field.keep_on_cpu, batch_size=field.batch_size)
        case _Flat():
            return MultiModalFlatField(
                keep_on_cpu=field.keep_on_cpu, dim=field.dim, slices=_read_slices(field)
            )


def _read_slices(field: _Flat) -> list[slice] | list[tuple[slice, ...]]:
    if field.per_dimension:
        return [tuple(slice(*each) for each in several) for several in field.slices]
    if any(len(several) != 1 for several in field.slices):
        raise CorruptSegmentError("a field has several slices where there can be one")
    return [slice(*several[0]) for several in field.slices]
