"""The little of canonical CBOR (RFC 8949, section 4.2.1) that block hashes need.

Only encoding, and only of the types vLLM puts into a block hash. What it writes
is byte for byte what ``cbor2.dumps(..., canonical=True)`` writes.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_Array = TypeVar("_Array", npt.NDArray[np.uint8], npt.NDArray[np.bool_])

_UNSIGNED = 0x00
_NEGATIVE = 0x20
_BYTES = 0x40
_TEXT = 0x60
_ARRAY = 0x80
NULL = b"\xf6"

# Argument sizes: the head byte's low five bits, and how many bytes follow.
_INLINE_LIMIT = 24


def head(major: int, argument: int) -> bytes:
    """The initial byte of a data item and its argument, in the shortest form.

    Args:
        major: major type, already shifted into the top three bits.
        argument: length, count or value, from 0 to 2**64 - 1.
    """
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
    """An integer of at most 64 bits."""
    return head(_UNSIGNED, value) if value >= 0 else head(_NEGATIVE, -1 - value)


def text(value: str) -> bytes:
    """A string.

    Raises:
        UnicodeEncodeError: the string holds a lone surrogate.
    """
    data = value.encode()
    return head(_TEXT, len(data)) + data


def byte_string(value: bytes) -> bytes:
    """A byte string."""
    return head(_BYTES, len(value)) + value


def array_head(count: int) -> bytes:
    """What precedes the ``count`` items of an array."""
    return head(_ARRAY, count)


def unsigned_arrays(
    values: Sequence[int], run: int, suffix: bytes = b""
) -> tuple[bytes, list[int]]:
    """Encode a list of non-negative integers as arrays of ``run`` items each.

    Works on the whole prompt in a few vector operations, because encoding token by
    token costs several times the hash itself.

    Args:
        values: integers from 0 to 2**64 - 1.
        run: how many of them make one array (a block).
        suffix: what to put after every array.

    Returns:
        The arrays of all full runs one after the other, and where they end, preceded
        by 0: array ``i`` with its suffix is ``data[ends[i]:ends[i + 1]]``.

    Raises:
        OverflowError: an integer is negative or too large.
        TypeError: an item is not an integer.
    """
    runs = len(values) // run
    if not runs:
        return b"", [0]
    used = values[: runs * run] if len(values) != runs * run else values
    try:
        numbers = np.frombuffer(array("I", used), dtype=np.uint32).reshape(runs, run)
    except OverflowError:
        return _wide_arrays(array("Q", used), run, suffix)
    # A row per run: array head, five bytes per integer, suffix; and which bytes count.
    before = array_head(run)
    row = np.frombuffer(before + bytes(5 * run) + suffix, dtype=np.uint8)
    rows = np.tile(row, (runs, 1))
    keep = np.ones_like(rows, dtype=np.bool_)
    cells = _cells(rows, len(before), run)
    kept = _cells(keep, len(before), run)
    # An integer's five bytes: a head byte, then four bytes big-endian. Shorter forms sit
    # at the right end, with their head byte just before what remains of the four.
    cells[..., 0] = 26
    cells[..., 1:] = numbers.astype(">u4").view(np.uint8).reshape(runs, run, 4)
    np.greater_equal(numbers, 1 << 16, out=kept[..., 0])
    kept[..., 1] = kept[..., 0]
    np.greater_equal(numbers, 1 << 8, out=kept[..., 2])
    np.greater_equal(numbers, _INLINE_LIMIT, out=kept[..., 3])
    np.copyto(cells[..., 2], 25, where=~kept[..., 0])
    np.copyto(cells[..., 3], 24, where=~kept[..., 2])
    ends = np.count_nonzero(keep, axis=1).cumsum()
    return rows[keep].tobytes(), [0, *ends.tolist()]


def _cells(rows: _Array, skip: int, run: int) -> _Array:
    """A view of the integers' bytes in ``rows``, shape (runs, run, 5)."""
    return rows[:, skip : skip + 5 * run].reshape(len(rows), run, 5)


def _wide_arrays(values: "array[int]", run: int, suffix: bytes) -> tuple[bytes, list[int]]:
    """The same where an integer exceeds 32 bits, which no tokenizer's does."""
    parts = [
        array_head(run) + b"".join(map(integer, values[start : start + run])) + suffix
        for start in range(0, len(values), run)
    ]
    return b"".join(parts), [0, *accumulate(map(len, parts))]
