"""Decoded pixels of an AVIF file, by the headers of its AV1 pictures.

The file states its size twice: in its own header, and in each AV1 picture. AV1 decoders allocate by
the latter and compare afterwards, so a kilobyte could take gigabytes.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

MAX_ITEMS: Final = 4096
MAX_REUSE: Final = 2  # bytes that the items of a file may have together, for each byte of the file
MAX_PARTS: Final = 65_536
"""Boxes of a level, or pieces of all items: 200 MB of empty boxes took 3.4 GB and 37 s."""

MAX_UNITS: Final = 256
MAX_FRAMES: Final = 8
"""Of an AV1 picture, which has a frame for each of up to four layers. A decoder decodes all frames
before one that it shows."""

_SEQUENCE_HEADER: Final = 1
_FRAMES: Final = (3, 6)  # a frame's header, or all of it
_PICTURE: Final = b"av01"
_UNREAD: Final = "its AVIF container is of a kind that is not read here: send JPEG or PNG"
_ANIMATED: Final = "it is an animated AVIF, which is not read here: send its pictures"


class UnreadAvifError(ValueError):
    """An AVIF file whose decoding cost is unknown; the text is for its user."""


def avif_pixels(data: bytes) -> int:
    """Return the pixels of the largest AV1 picture, or half the total if more: transparency is a
    picture of equal size. Raises UnreadAvifError: the file is animated, damaged or unsupported."""
    try:
        sizes = [_coded_pixels(part) for part in _pictures(data)]
    except (IndexError, struct.error) as error:
        raise UnreadAvifError(_UNREAD) from error
    if not sizes:
        raise UnreadAvifError(_UNREAD)
    return max(*sizes, sum(sizes) // 2)


def _pictures(data: bytes) -> Iterator[bytes]:
    top = _boxes(data, 0, len(data))
    if b"moov" in top or data[8:12] == b"avis":
        raise UnreadAvifError(_ANIMATED)
    inside = _boxes(data, _only(top, b"meta").start + 4, _only(top, b"meta").end)
    kinds = _kinds(data, _only(inside, b"iinf"))
    own = inside.get(b"idat", [_Box(0, 0)])[0]
    reused = parts = 0
    for item in _items(data, _only(inside, b"iloc")):
        base = own if item.in_idat else _Box(0, len(data))
        pieces = [data[base.start + at : min(base.end, base.start + at + n)] for at, n in item.at]
        reused += sum(n for _, n in item.at)
        parts += len(item.at)
        if (
            parts > MAX_PARTS
            or reused > MAX_REUSE * len(data)
            or list(map(len, pieces)) != [n for _, n in item.at]
        ):
            raise UnreadAvifError(_UNREAD)
        if item.number in kinds:
            yield b"".join(pieces)


class _Box(NamedTuple):
    """Offsets of a box's content."""

    start: int
    end: int


class _Item(NamedTuple):
    """Offset and length of each piece of an item."""

    number: int
    in_idat: bool
    at: list[tuple[int, int]]


def _boxes(data: bytes, at: int, end: int) -> dict[bytes, list[_Box]]:
    found: dict[bytes, list[_Box]] = {}
    for _ in range(MAX_PARTS):
        if at >= end:
            return found
        size, kind = struct.unpack_from(">I4s", data, at)
        start = at + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start)
            start += 8
        after = end if size == 0 else at + size
        if not start <= after <= end:
            raise UnreadAvifError(_UNREAD)
        found.setdefault(kind, []).append(_Box(start, after))
        at = after
    raise UnreadAvifError(_UNREAD)


def _only(boxes: dict[bytes, list[_Box]], kind: bytes) -> _Box:
    if len(boxes.get(kind, ())) != 1:
        raise UnreadAvifError(_UNREAD)
    return boxes[kind][0]


def _kinds(data: bytes, box: _Box) -> set[int]:
    """Return the numbers of the items that are AV1 pictures."""
    pictures = set()
    entries = box.start + (6 if data[box.start] == 0 else 8)
    for entry in _boxes(data, entries, box.end).get(b"infe", ()):
        number, at = (">H", 6) if data[entry.start] == 2 else (">I", 8)
        if data[entry.start] not in (2, 3):
            raise UnreadAvifError(_UNREAD)
        if data[entry.start + at + 2 : entry.start + at + 6] == _PICTURE:
            pictures.add(struct.unpack_from(number, data, entry.start + 4)[0])
    return pictures


def _items(data: bytes, box: _Box) -> Iterator[_Item]:
    reader = _Bytes(data, box)
    version = reader.number(1)
    reader.number(3)
    widths = reader.number(2)
    offset, length, base, index = (widths >> shift & 15 for shift in (12, 8, 4, 0))
    wide = 4 if version == 2 else 2
    seen: Counter[int] = Counter()
    for _ in range(_few(reader.number(wide))):
        number = reader.number(wide)
        seen[number] += 1
        method = reader.number(2) & 15 if version else 0
        source = reader.number(2)
        start = reader.number(base)
        pieces = []
        for _ in range(_few(reader.number(2))):
            reader.number(index if version else 0)
            at = start + reader.number(offset)
            pieces.append((at, reader.number(length)))
        if method > 1 or source or seen[number] > 1 or any(n == 0 for _, n in pieces):
            raise UnreadAvifError(_UNREAD)
        yield _Item(number, method == 1, pieces)


def _few(count: int) -> int:
    if count > MAX_ITEMS:
        raise UnreadAvifError(_UNREAD)
    return count


class _Bytes:
    """Reader of big-endian numbers."""

    def __init__(self, data: bytes, box: _Box) -> None:
        self._data = data
        self._at, self._end = box

    def number(self, size: int) -> int:
        at, self._at = self._at, self._at + size
        if self._at > self._end:
            raise UnreadAvifError(_UNREAD)
        return int.from_bytes(self._data[at : self._at], "big")


def _coded_pixels(data: bytes) -> int:
    """Return the maximum pixels of a frame of an AV1 picture."""
    units = list(islice(_units(data), MAX_UNITS + 1))
    frames = sum(kind in _FRAMES for kind, _ in units)
    found = [_frame_pixels(unit) for kind, unit in units if kind == _SEQUENCE_HEADER]
    if not found or len(units) > MAX_UNITS or frames > MAX_FRAMES:
        raise UnreadAvifError(_UNREAD)
    return max(found)


def _units(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and content of the units of an AV1 stream."""
    at = 0
    while at < len(data):
        head = data[at]
        at += 2 if head & 4 else 1
        size = len(data) - at
        if head & 2:
            size, shift = 0, 0
            while True:
                byte = data[at]
                at += 1
                size |= (byte & 127) << shift
                shift += 7
                if not byte & 128:
                    break
                if shift > 28:
                    raise UnreadAvifError(_UNREAD)
        if at + size > len(data):
            raise UnreadAvifError(_UNREAD)
        yield head >> 3 & 15, data[at : at + size]
        at += size


class _Bits:
    """Reader of bits."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data[:64], "big")
        self._left = 8 * len(data[:64])

    def number(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise UnreadAvifError(_UNREAD)
        return self._value >> self._left & ((1 << count) - 1)


def _frame_pixels(unit: bytes) -> int:
    """Return the product of the largest width and height that a sequence header allows. Unless the
    header is a still picture's short one, frames carry their own size. Decoders need not check it
    against the header, so the full range of its bits counts."""
    bits = _Bits(unit)
    bits.number(4)  # profile, and whether it is a still picture
    short = bits.number(1)
    if short:
        bits.number(5)
    else:
        if bits.number(1):
            raise UnreadAvifError(_UNREAD)  # times of frames, which pictures have not
        delays = bits.number(1)
        for _ in range(bits.number(5) + 1):
            bits.number(12)
            if bits.number(5) > 7:
                bits.number(1)
            if delays and bits.number(1):
                bits.number(4)
    wide, high = bits.number(4) + 1, bits.number(4) + 1
    width, height = bits.number(wide) + 1, bits.number(high) + 1
    return width * height if short else 1 << wide + high
