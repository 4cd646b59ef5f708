"""Refusing MP4 and QuickTime files that claim more samples than they can hold.

FFmpeg makes an entry of some 70 bytes for each sample when it opens such a file. A header can
claim billions in four bytes.
"""

import re
import struct
from typing import Final

MOST_SAMPLES: Final = 30_000_000
"""Ten minutes of uncompressed sound at 48 kHz, or days of film."""

_TABLES: Final = re.compile(rb"stsz|stz2|trun|cmov")
_HEADER: Final = struct.Struct(">I4s")
_LONG: Final = struct.Struct(">Q")
_COUNT_AT: Final = {b"stsz": 12, b"stz2": 12, b"trun": 8}
"""From a table's name to its number of samples, in bytes."""


def claims_too_many_samples(data: bytes) -> bool:
    """Whether FFmpeg would take memory for samples that aren't there.

    Looks for tables wherever they may be, save in the media themselves, since FFmpeg looks
    for them in many places. A table that is compressed could hide anything, so it counts too.
    """
    most = min(MOST_SAMPLES, len(data))
    claimed = 0
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind = _HEADER.unpack_from(data, at)
        if size == 1 and at + 16 <= len(data):
            (size,) = _LONG.unpack_from(data, at + 8)
        if at == 0 and size > len(data):
            return False  # it is no file of this kind
        end = len(data) if size == 0 else min(len(data), at + size)
        if kind != b"mdat":
            for table in _TABLES.finditer(data, at, end):
                if table[0] == b"cmov":
                    return True
                where = table.start() + _COUNT_AT[table[0]]
                claimed += int.from_bytes(data[where : where + 4], "big")
                if claimed > most:
                    return True
        if end <= at:
            return False
        at = end
    return False
