"""Refuse audio and video whose metadata takes FFmpeg or libsndfile quadratic time.

FFmpeg compares each title with all titles before it: 75,000 of them, in a file of 750 KB, take half
a minute. ``decoder_guard`` ends a file that takes long while FFmpeg reads it. Counted here is what
FFmpeg reads first and compares afterwards.
"""

import re
from typing import Final

from common.media.formats import after_tags

MAX_ENTRIES: Final = 10_000
_CHANCE: Final = 1 << 14
"""Bytes for which one entry more is allowed: two random bytes are a name once in 65,536."""

MAX_COMMENT_BYTES: Final = 1 << 17
"""Of Vorbis comments, of which the shortest have nine bytes."""
_COMMENT: Final = 4
_MAX_BLOCKS: Final = 1_024

_MATROSKA: Final = b"\x1a\x45\xdf\xa3"
_NAMES: Final = {
    _MATROSKA: (b"\x67\xc8", b"\x73\xc4"),  # titles and chapters
    b"\x06\x0e\x2b\x34": (b"\x06\x0e\x2b\x34\x02\x53\x01\x01",),  # sets of MXF
}
_FRAMES_OF_ID3: Final = re.compile(rb"T[A-Z0-9]{2}|COM|PIC|PRI|CHA|ULT|USL|SLT|SYL")
"""Names of three or four letters, of frames that libsndfile or FFmpeg keep."""
_WITH_ID3: Final = (b"ID3", b"\xff")

_OGG_PAGE: Final = re.compile(rb"OggS\x00.{21}(.)", re.DOTALL)
_LACING: Final = 255


def has_too_much_metadata(data: bytes) -> bool:
    """Return whether FFmpeg would compare too many pieces of metadata."""
    most = MAX_ENTRIES + len(data) // _CHANCE
    start = after_tags(data)
    return (
        any(
            data.startswith(begins) and data.count(name) > most
            for begins, names in _NAMES.items()
            for name in names
        )
        or (data.startswith(_WITH_ID3) and sum(1 for _ in _FRAMES_OF_ID3.finditer(data)) > 2 * most)
        or (data.startswith(b"OggS", start) and _in_long_packets(data) > MAX_COMMENT_BYTES)
        or (data.startswith(b"fLaC", start) and _in_comments(data, start + 4) > MAX_COMMENT_BYTES)
    )


def _in_long_packets(data: bytes) -> int:
    """Return the bytes of Ogg pages in which no packet ends. Few packets of sound have one."""
    total = 0
    for page in _OGG_PAGE.finditer(data):
        segments = page[1][0]
        if data[page.end() : page.end() + segments] == bytes([_LACING]) * segments:
            total += segments * _LACING
    return total


def _in_comments(data: bytes, at: int) -> int:
    """Return the bytes of all comments of a FLAC file, or too many if it has too many blocks."""
    total = 0
    for _ in range(_MAX_BLOCKS):
        head = data[at : at + 4]
        size = int.from_bytes(head[1:], "big")
        if len(head) < 4:
            return total
        total += size if head[0] & 0x7F == _COMMENT else 0
        if head[0] & 0x80:  # the last
            return total
        at += 4 + size
    return MAX_COMMENT_BYTES + 1
