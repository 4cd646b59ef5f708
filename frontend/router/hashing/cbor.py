"""Encoder for the part of canonical CBOR (RFC 8949, section 4.2.1) that block hashes need.

The output equals ``cbor2.dumps(..., canonical=True)`` byte for byte.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_UNSIGNED = 0x00
_NEGATIVE = 0x20
_BYTES = 0x40
_TEXT = 0x60
_ARRAY = 0x80
NULL = b"\xf6"

# Argument sizes: the head byte's low five bits, and how many bytes follow.
_INLINE_LIMIT = 24


def head(major: int, argument: int) -> bytes:
    """Return the shortest head of a data item; ``major`` is shifted into the top three bits."""
    if argument < _INLINE_LIMIT:
        return bytes((major | argument,))
    if argument < 1 << 8:
        return bytes((major | 24, argument))
    if argument < 1 << 16:
        return bytes((major | 25,)) + argument.to_bytes(2, "big")
    if argument < 1 << 32:
        return bytes((major | 26,)) + argument.to_bytes(4, "big")
    return bytes((major | 27,)) + argument.to_bytes(8, "big")


@lru_cache(maxsize=1 << 14)
def integer(value: int) -> bytes:
    return head(_UNSIGNED, value) if value >= 0 else head(_NEGATIVE, -1 - value)


def text(value: str) -> bytes:
    """Encode a string. Raises UnicodeEncodeError if it holds a lone surrogate."""
    data = value.encode()
    return head(_TEXT, len(data)) + data


def byte_string(value: bytes) -> bytes:
    return head(_BYTES, len(value)) + value


def array_head(count: int) -> bytes:
    return head(_ARRAY, count)


def unsigned_arrays(
    values: Sequence[int], run: int, suffix: bytes = b""
) -> tuple[bytes, list[int]]:
    """Encode integers from 0 to 2**32 - 1 as arrays of ``run`` items, each followed by ``suffix``.

    Works on the whole prompt in a few vector operations: encoding token by token costs several
    times the hash itself. The suffix has at most 8 bytes. Returns the concatenated full arrays, and
    where they end, preceded by 0: array ``i`` with its suffix is ``data[ends[i]:ends[i + 1]]``.

    Raises:
        OverflowError: an integer is negative or too large.
        TypeError: an item is not an integer.
    """
    runs = len(values) // run
    if not runs:
        return b"", [0]
    whole = values[: runs * run] if len(values) != runs * run else values
    numbers = np.frombuffer(array("I", whole), dtype=np.uint32).reshape(runs, run)
    # One eight-byte cell per item, with the encoding at its right end: read as a big-endian
    # number, that is the value plus the head byte shifted in front of it. Then drop the
    # bytes that are not part of an encoding.
    form = (numbers >= _INLINE_LIMIT).view(np.uint8) + (numbers >= 1 << 8).view(np.uint8)
    form += (numbers >= 1 << 16).view(np.uint8)
    cells = np.empty((runs, run + 2), dtype=_CELL)
    used = np.empty((runs, run + 2), dtype=_CELL)
    before = array_head(run)
    cells[:, 0], used[:, 0] = int.from_bytes(before, "big"), _USED[len(before)]
    cells[:, 1:-1], used[:, 1:-1] = _HEADS.take(form) + numbers, _FORMS.take(form)
    cells[:, -1], used[:, -1] = int.from_bytes(suffix, "big"), _USED[len(suffix)]
    data = np.compress(used.view(np.bool_).ravel(), cells.view(np.uint8).ravel())
    lengths = _LENGTHS.take(form).sum(axis=1) + (len(before) + len(suffix))
    return data.tobytes(), [0, *lengths.cumsum().tolist()]


_CELL = np.dtype(">u8")
# By number of bytes used of a cell: a one in each of them.
_USED = [int.from_bytes(bytes([1]) * count, "big") for count in range(9)]
# By form of an integer, from one byte to five (four have no form): head, bytes, length.
_HEADS = np.array([0, 24 << 8, 25 << 16, 26 << 32], dtype=np.uint64)
_LENGTHS = np.array([1, 2, 3, 5], dtype=np.int64)
_FORMS = np.array([_USED[length] for length in (1, 2, 3, 5)], dtype=np.uint64)
