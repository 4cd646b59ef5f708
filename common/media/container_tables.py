"""Refuse audio and video that take FFmpeg far more memory or time than their size justifies.

When FFmpeg opens MP4 or QuickTime, it builds an index: an entry per sample, per 1,024 samples of
PCM audio, and per repetition in an edit list. A header claims billions of entries in four bytes, as
do its lists of pictures and names. FLV and MXF have one such number each. A Matroska track takes
two bytes in the file, and hundreds in memory.

Tables are searched everywhere except in the media data, because FFmpeg looks in many places. Only a
track with exactly one of every table is judged by itself.

Some metadata takes FFmpeg or libsndfile quadratic time: FFmpeg compares each title with all titles
before it, and 75,000 of them, in a file of 750 KB, take half a minute. Counted here is what FFmpeg
reads first and compares afterwards; ``decoder_guard`` ends a file that takes long while it is read.
"""

import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final, Self

import numpy as np

from common.media.formats import after_tags

MAX_BYTES: Final = 64 << 20  # of FFmpeg's index of any file
MAX_SHARE: Final = 8
"""Of such bytes for each byte of the file. A sample takes more than one in the file itself."""

MAX_SAMPLES: Final = 30_000_000  # ten minutes of uncompressed sound at 48 kHz, or days of film

_SAMPLE: Final = 64
"""Bytes that FFmpeg takes for a sample: its entry, its times, and copies while it sorts them."""
_ENTRY: Final = 24
_FREE_EDITS: Final = 4
"""Edits of a track that are no repetition: a start that is cut, an end, a pause."""
_PIECE: Final = 160  # samples of plain sound for which there is an entry, at the least

_TABLES: Final = re.compile(rb"stsz|stz2|trun|stsc|stco|co64|elst|sgpd|stts|cmov")
_TRACKS_ONLY: Final = frozenset((b"stsz", b"stz2", b"stsc", b"stco", b"co64", b"elst"))
_BOX: Final = struct.Struct(">I4s")
_LONG: Final = struct.Struct(">Q")
_FIRST: Final = frozenset(
    b"ftyp moov moof mdat pnot udta wide free skip junk pict uuid prfl styp sidx meta".split()
)

_LISTS: Final = re.compile(
    rb"keys.{4}(.{4})|iinf[^\x00].{3}(.{4})|iloc[^\x00\x01].{5}(.{4})", re.DOTALL
)
"""Lists of MP4 whose number FFmpeg takes memory for at once, eight bytes for each."""
_MAX_LISTED: Final = 1 << 26
"""More than FFmpeg ever takes memory for. Four letters of a text are more than that."""

_MATROSKA: Final = b"\x1a\x45\xdf\xa3"
_MATROSKA_TRACKS: Final = re.compile(rb"\x16\x54\xae\x6b")
_MAX_TRACKS: Final = 1000  # FFmpeg's own limit, which it looks at when it has read all of them

_MATROSKA_LISTS: Final = re.compile(
    rb"\x10\x43\xa7\x70|\x11\x4d\x9b\x74|\x12\x54\xc3\x67|\x16\x54\xae\x6b|\x19\x41\xa4\x69|\x1c\x53\xbb\x6b"
)
"""Chapters, places of parts, tags, tracks, attachments and an index."""
_WITH_ELEMENTS: Final = frozenset({
    b"\x45\xb9", b"\x4d\xbb", b"\x61\xa7", b"\x62\x40", b"\x63\xc0", b"\x67\xc8", b"\x6d\x80",
    b"\x73\x73", b"\xae", b"\xb6", b"\xb7", b"\xbb", b"\xe2", b"\xe3",
})  # fmt: skip
_MAX_ELEMENTS: Final = 1 << 18
"""Of these lists, in a file. Two bytes of one are up to 70 in memory, and 9 MB took 0.5 GB."""

_FLV_ARRAYS: Final = re.compile(rb"(?:times|filepositions)\x0a(.{4})", re.DOTALL)
_FLV_NUMBER: Final = 9
_MXF_START: Final = b"\x06\x0e\x2b\x34"
_MXF_DURATION: Final = re.compile(rb"\x3f\x0c\x00\x08(.{8})", re.DOTALL)

MAX_ENTRIES: Final = 10_000
_CHANCE: Final = 1 << 14
"""Bytes for which one entry more is allowed: two random bytes are a name once in 65,536."""

MAX_COMMENT_COST: Final = 1 << 30
"""Vorbis comments times their bytes: 10,000 of 10, or a few and a cover of megabytes. FFmpeg takes
1.4 s for as many."""
_COMMENT_LENGTH: Final = re.compile(rb"[^\x00]\x00\x00")
_LONG_COMMENT: Final = 1 << 16  # its length has one byte less of zeros
_COMMENT: Final = 4
_MAX_BLOCKS: Final = 1_024

_NAMES: Final = {
    _MATROSKA: (re.compile(rb"\x67\xc8"), re.compile(rb"\x73\xc4")),  # titles and chapters
    _MXF_START: (re.compile(rb"\x06\x0e\x2b\x34\x02\x53\x01\x01"),),  # sets of MXF
}
_TAG: Final = re.compile(rb"ID3[\x02-\x04][^\xff].([\x00-\x7f]{4})", re.DOTALL)
_MAX_TAGS: Final = 4_096
"""ID3 tags of a file, which pieces of a broadcast have one each of."""
_FRAMES_OF_ID3: Final = re.compile(rb"T[A-Z0-9]{2}|COM|PIC|PRI|CHA|ULT|USL|SLT|SYL")
"""Names of three or four letters, of frames that libsndfile or FFmpeg keep."""

_PACKED_CHAPTER: Final = re.compile(
    rb"CHAP(?:\xff\x00?|[^\xff]){5}[\x08-\x0f\x18-\x1f\x28-\x2f\x38-\x3f\x48-\x4f\x58-\x5f\x68-\x6f\x78-\x7f"
    rb"\x88-\x8f\x98-\x9f\xa8-\xaf\xb8-\xbf\xc8-\xcf\xd8-\xdf\xe8-\xef\xf8-\xff]"
)
"""A compressed frame with titles, which nobody writes: FFmpeg compared those of 130 KB for 10 s."""

_SMALL_FRAMES_OF_ID3: Final = re.compile(rb"(?<=[A-Z0-9]{3})\x00\x00")
"""Names, and sizes below 16 KiB, or 256 bytes behind names of three letters. For each odd frame
libmpg123, in libsndfile, writes 100 bytes on the log: a sound of 5.8 MB made it grow by 106 MB."""
_MAX_SMALL_FRAMES: Final = 4_096

_OGG_PAGE: Final = re.compile(rb"OggS\x00.{21}(.)", re.DOTALL)
_HANDLERS: Final = re.compile(rb"soun|vide|trak")

_PIECE_BYTES: Final = 1 << 17
_MAX_MATCH: Final = 64
_LACING: Final = 255


def fault_of(data: bytes) -> str:
    """Return why a medium must not be opened, as half a sentence; empty if it may."""
    if claims_too_much(data):
        return "claims more samples than it can hold"
    if has_too_much_metadata(data):
        return "has too many titles, chapters or other metadata"
    return ""


def _matches(
    pattern: re.Pattern[bytes], data: bytes | memoryview, start: int = 0, end: int | None = None
) -> Iterator[re.Match[bytes]]:
    """Yield what ``finditer`` does, searching piece by piece: a search holds the GIL. One of
    200 MB stopped the event loop for 7 s."""
    end = len(data) if end is None else end
    while start < end:
        begin, start = start, min(end, start + _PIECE_BYTES)
        for found in pattern.finditer(data, begin, min(end, start + _MAX_MATCH)):
            if found.start() >= begin + _PIECE_BYTES:
                break
            yield found
            start = max(start, found.end())


def _has_more(
    pattern: re.Pattern[bytes],
    data: bytes,
    most: int,
    spans: Iterable[tuple[int, int | None]] = ((0, None),),
) -> bool:
    """Return whether more matches are there, without looking for all that a file is full of."""
    found = chain.from_iterable(_matches(pattern, data, *span) for span in spans)
    return next(islice(found, most, None), None) is not None


def claims_too_much(data: bytes | memoryview) -> bool:
    """Return whether FFmpeg would allocate memory for missing data when it opens a file."""
    start = after_tags(data)
    if bytes(data[start : start + 3]) == b"FLV":
        return any(
            int.from_bytes(found[1], "big") * _FLV_NUMBER > len(data)
            for found in _matches(_FLV_ARRAYS, data)
        )
    if bytes(data[start : start + 4]) == _MATROSKA:
        return _has_too_many_elements(data)
    if _MXF_START in bytes(data[: 1 << 16]):
        return any(
            int.from_bytes(found[1], "big") > len(data) for found in _matches(_MXF_DURATION, data)
        )
    return _lists_too_much(data) or _claims_too_many_samples(data)


def _lists_too_much(data: bytes | memoryview) -> bool:
    """Return whether a list of an MP4 has more entries than the file has bytes."""
    return any(
        len(data) < int.from_bytes(found[found.lastindex or 0], "big") < _MAX_LISTED
        for found in _matches(_LISTS, data)
    )


def _has_too_many_elements(data: bytes | memoryview) -> bool:
    """Return whether a Matroska or WebM file has more tracks, or longer lists, than any film."""
    return any(
        next(islice(elements, most, None), None) is not None
        for elements, most in (
            (_elements(data, _MATROSKA_TRACKS, frozenset()), _MAX_TRACKS),
            (_elements(data, _MATROSKA_LISTS, _WITH_ELEMENTS), _MAX_ELEMENTS),
        )
    )


def _elements(
    data: bytes | memoryview, lists: re.Pattern[bytes], opened: frozenset[bytes]
) -> Iterator[int]:
    """Yield where the EBML elements of lists begin, and those within the ``opened`` ones. Ignores
    the end of a list: later elements have other names."""
    for found in _matches(lists, data):
        at = found.end() + _length_of_number(data, found.end())
        while at + 1 < len(data) and data[at]:
            yield at
            name = bytes(data[at : at + _length_of_number(data, at)])
            at += len(name)
            width = _length_of_number(data, at)
            size = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
            at += width + (0 if name in opened else size)


def _length_of_number(data: bytes | memoryview, at: int) -> int:
    """Return the bytes of an EBML number, by its first bits."""
    return 9 - data[at].bit_length() if at < len(data) else 1


def _claims_too_many_samples(data: bytes | memoryview) -> bool:
    tracks: list[_Track] = []
    rest = _Track(data)
    for start, end, kind in _boxes(data, 0, len(data)):
        if start == 0 and end >= len(data) and kind not in _FIRST:
            return False  # no file of this kind
        if kind == b"mdat":
            continue
        inside = list(_boxes(data, start + 8, end)) if kind == b"moov" else []
        for from_, to, child in inside:
            track = _Track.between(data, from_, to)
            if child == b"trak" and track.is_whole:
                tracks.append(track)
            else:
                rest.look(from_, to)
        if not inside:
            rest.look(start, end)
    if not rest.tables.keys().isdisjoint(_TRACKS_ONLY):
        # A stray table may belong to any track: all tracks are judged as one.
        for track in tracks:
            rest.join(track)
        tracks = []
    every = [*tracks, rest]
    most = min(MAX_SAMPLES, len(data))
    return (
        any(track.is_impossible for track in every)
        or sum(track.samples for track in every) > most
        or sum(track.cost for track in every) > MAX_BYTES + MAX_SHARE * len(data)
    )


def _boxes(data: bytes | memoryview, at: int, end: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield start, end and name of consecutive boxes."""
    while at + _BOX.size <= end:
        size, kind = _BOX.unpack_from(data, at)
        if size == 1 and at + 16 <= end:
            (size,) = _LONG.unpack_from(data, at + 8)
        after = end if size == 0 else min(end, at + size)
        if after <= at:
            return
        yield at, after, kind
        at = after


@dataclass
class _Track:
    """Tables of one track, or of several that can't be separated."""

    data: bytes | memoryview
    tables: dict[bytes, list[int]] = field(default_factory=dict)
    sounds: bool = False
    names: int = 0

    @classmethod
    def between(cls, data: bytes | memoryview, start: int, end: int) -> Self:
        named = Counter(found[0] for found in _matches(_HANDLERS, data, start, end))
        sounds = named[b"soun"] == 1 and not named[b"vide"]
        track = cls(data, sounds=sounds, names=named[b"trak"])
        track.look(start, end)
        return track

    def look(self, start: int, end: int) -> None:
        for table in _matches(_TABLES, self.data, start, end):
            self.tables.setdefault(table[0], []).append(table.end())

    def join(self, other: "_Track") -> None:
        for kind, places in other.tables.items():
            self.tables.setdefault(kind, []).extend(places)

    @property
    def is_whole(self) -> bool:
        """Whether no table can belong to another track."""
        chunks = len(self.tables.get(b"stco", ())) + len(self.tables.get(b"co64", ()))
        sizes = len(self.tables.get(b"stsz", ())) + len(self.tables.get(b"stz2", ()))
        others = all(len(self.tables.get(kind, ())) == 1 for kind in (b"stsc", b"stts"))
        return self.names == 1 and chunks == sizes == 1 and others

    @property
    def is_impossible(self) -> bool:
        """Whether it is compressed, which could hide anything, or has more groups than bytes."""
        if b"cmov" in self.tables:
            return True
        return any(self._groups(at) > len(self.data) for at in self._at(b"sgpd"))

    @property
    def samples(self) -> int:
        sized = sum(self._number(at + 8) for kind in (b"stsz", b"stz2") for at in self._at(kind))
        return sized + sum(self._number(at + 4) for at in self._at(b"trun"))

    @property
    def cost(self) -> int:
        """Maximum bytes of FFmpeg's index."""
        chunks = sum(
            min(self._number(at + 4), (len(self.data) - at) // each)
            for kind, each in ((b"stco", 4), (b"co64", 8))
            for at in self._at(kind)
        )
        in_chunk = max((self._most_in_chunk(at) for at in self._at(b"stsc")), default=0)
        pieces = chunks * -(-in_chunk // _PIECE) * _ENTRY
        if self._is_plain_sound:
            return pieces
        edits = sum(
            min(self._number(at + 4), (len(self.data) - at) // 12) for at in self._at(b"elst")
        )
        repeated = max(0, edits - _FREE_EDITS) * _ENTRY
        return pieces + self.samples * (_SAMPLE + repeated)

    @property
    def _is_plain_sound(self) -> bool:
        """Whether FFmpeg has no entry per sample: all have the same duration and size."""
        if not (self.is_whole and self.sounds and self._at(b"stsz")):
            return False
        (times,), (sizes,) = self._at(b"stts"), self._at(b"stsz")
        return (
            self._number(times + 4) == 1
            and self._number(times + 12) == 1
            and self._number(sizes + 4) > 0
        )

    def _groups(self, at: int) -> int:
        later = self._number(at) >> 24 > 0  # a version with one more field before the number
        return self._number(at + 12 if later else at + 8)

    def _most_in_chunk(self, at: int) -> int:
        entries = max(0, min(self._number(at + 4), (len(self.data) - at - 8) // 12))
        said = np.frombuffer(self.data, ">u4", 3 * entries, at + 8) if entries else np.zeros(3)
        return int(said[1::3].max())

    def _at(self, kind: bytes) -> list[int]:
        return self.tables.get(kind, [])

    def _number(self, at: int) -> int:
        return int.from_bytes(self.data[at : at + 4], "big")


def has_too_much_metadata(data: bytes) -> bool:
    """Return whether FFmpeg would compare too many pieces of metadata."""
    most = MAX_ENTRIES + len(data) // _CHANCE
    start = after_tags(data)
    tags = list(islice(_spans_of_tags(data), _MAX_TAGS + 1))
    return (
        len(tags) > _MAX_TAGS
        or any(
            data.startswith(begins) and _has_more(name, data, most)
            for begins, names in _NAMES.items()
            for name in names
        )
        or _has_more(_FRAMES_OF_ID3, data, 2 * most, tags)
        or _has_more(_PACKED_CHAPTER, data, 0, tags)
        or _has_more(_SMALL_FRAMES_OF_ID3, data, _MAX_SMALL_FRAMES, tags)
        or (data.startswith(b"OggS", start) and _are_costly(data, _in_long_packets(data)))
        or (data.startswith(b"fLaC", start) and _has_costly_blocks(data, start + 4))
    )


def _spans_of_tags(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where ID3 tags are, wherever a sound, or a sound in another, may have one."""
    end = 0
    for tag in _matches(_TAG, data):
        after = tag.end() + sum(
            byte << shift for byte, shift in zip(tag[1], (21, 14, 7, 0), strict=True)
        )
        if after > end:
            yield max(tag.start(), end), after
            end = after


def _are_costly(data: bytes, spans: Iterable[tuple[int, int]]) -> bool:
    """Return whether comments, however spread over these bytes, take FFmpeg too long."""
    comments = size = 0
    for start, end in spans:
        for at in range(start, end, _PIECE_BYTES):
            comments += len(_COMMENT_LENGTH.findall(data, at, min(end, at + _PIECE_BYTES)))
        size += end - start
        if (comments + size // _LONG_COMMENT) * size > MAX_COMMENT_COST:
            return True
    return False


def _in_long_packets(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield Ogg pages in which no packet ends. Few packets of sound have one."""
    for page in _matches(_OGG_PAGE, data):
        segments = page[1][0]
        body = page.end() + segments
        if data[page.end() : body] == bytes([_LACING]) * segments:
            yield body, body + segments * _LACING


def _has_costly_blocks(data: bytes, at: int) -> bool:
    """Return whether a FLAC file has costly comments, or too many blocks."""
    comments = []
    for _ in range(_MAX_BLOCKS):
        head = data[at : at + 4]
        size = int.from_bytes(head[1:], "big")
        if len(head) < 4:
            break
        if head[0] & 0x7F == _COMMENT:
            comments.append((at + 4, at + 4 + size))
        if head[0] & 0x80:  # the last
            break
        at += 4 + size
    else:
        return True
    return _are_costly(data, comments)
