"""Read a client's ``torch.save`` tensor, in memory proportional to its bytes.

``torch.load(weights_only=True)`` runs no code, but 900 bytes can make it allocate gigabytes: by
calling ``bytearray``, by deflated records, by strides of 0, or by a sparse shape. So only dense
tensors are read.
"""

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from io import BytesIO
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import torch

MAX_PICKLE: Final = 16 << 10
"""Bytes of what says which shape a tensor has; ``torch.save`` makes some 300 of them."""

MAX_RECORDS: Final = 64  # files in the archive; ``torch.save`` makes seven of one tensor

_ENTRY: Final = b"PK\x01\x02"
"""Signature of an entry in an archive's directory, which is read as a whole."""

_OPCODES: Final = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.REDUCE, pickle.BINPERSID),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_TUPLE),
    *(pickle.BINUNICODE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.NEWTRUE, pickle.NEWFALSE, pickle.NONE),
)
"""Opcodes that a tensor needs. Others allocate memory for sizes that a file only claims."""

_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "BFloat16Storage": torch.bfloat16,
        "BoolStorage": torch.bool,
        "ByteStorage": torch.uint8,
        "CharStorage": torch.int8,
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "IntStorage": torch.int32,
        "LongStorage": torch.int64,
        "ShortStorage": torch.int16,
    }
)


class TensorFileError(ValueError):
    """The file holds no supported tensor; the text says what to send instead."""


class _Kind(NamedTuple):
    """Placeholder of a storage class. A pickle can name it, but not call it."""

    dtype: torch.dtype


def load(data: bytes) -> torch.Tensor:
    """Return the tensor of a file. Raises TensorFileError: no tensor, or larger than the file."""
    if data.count(_ENTRY) > MAX_RECORDS:
        raise TensorFileError("it has too many records: send one tensor")
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            return _load(archive, len(data))
    except (TensorFileError, MemoryError):
        raise
    except Exception as error:  # re-raised: a pickle of a stranger can fail in any way
        raise TensorFileError(
            "it is no file of one dense tensor, as torch.save writes it"
        ) from error


def _load(archive: zipfile.ZipFile, size: int) -> torch.Tensor:
    records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise TensorFileError("its records are compressed: send the file as torch.save writes it")
    if sum(record.file_size for record in records) > size:  # they lie over each other
        raise TensorFileError("its records are larger than the file")
    pickled = next(record for record in records if record.filename.endswith("/data.pkl"))
    if pickled.file_size > MAX_PICKLE:
        raise TensorFileError("it holds more than a tensor")
    root = pickled.filename.removesuffix("data.pkl")
    order = f"{root}byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise TensorFileError("its numbers are big-endian: send little-endian ones")
    tensor = _Unpickler(
        archive.read(pickled), lambda key: bytearray(archive.read(f"{root}data/{key}"))
    ).load()
    if not isinstance(tensor, torch.Tensor):
        raise TensorFileError("it holds something else than a tensor")
    if not tensor.isfinite().all():
        # They would stay in an engine's KV cache, and spoil the answer to the next request there.
        raise TensorFileError("it has values that are no numbers, or infinite")
    return tensor


# Python's own implementation: it can be restricted to opcodes, and its memo is a dict. The C
# implementation allocates a table as large as the largest index in the file.
class _Unpickler(pickle._Unpickler):
    """Unpickler of dense tensors only."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES
    }

    def __init__(self, pickled: bytes, read: Callable[[str], bytearray]) -> None:
        super().__init__(BytesIO(pickled))
        self._read = lru_cache(read)  # a pickle may ask for the same a thousand times

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and name in _DTYPES:
            return _Kind(_DTYPES[name])
        known = _CALLED.get((module, name))
        if known is None:
            raise TensorFileError(
                f"it needs {module[:64]}.{name[:64]}, which is not read here: send a dense tensor "
                "of a plain type (`tensor.to_dense().detach().cpu()`)"
            )
        return known

    def persistent_load(self, pid: Any) -> torch.Tensor:
        kind, (dtype,), key, _, _ = pid
        if kind != "storage":
            raise TensorFileError("it refers to something else than numbers")
        data = self._read(key)
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _tensor(
    storage: torch.Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> torch.Tensor:
    if not all(type(length) is int and length >= 0 for length in size):
        raise TensorFileError("its shape is no shape")
    if math.prod(size) > len(storage):
        raise TensorFileError("its tensor is larger than its data: send `tensor.contiguous()`")
    return storage.as_strided(size, stride, offset)  # raises for an access out of bounds


def _parameter(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return tensor


_CALLED: Final[Mapping[tuple[str, str], Callable[..., Any]]] = MappingProxyType(
    {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_parameter"): _parameter,
    }
)
