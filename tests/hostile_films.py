"""Films and sounds of some kilobytes whose tables have FFmpeg take hundreds of megabytes.

Each is whole as far as its container goes: what is odd is how often a table repeats something.
"""

import io
import struct
from collections.abc import Mapping
from typing import Final

import av
import numpy as np

MANY: Final = 40_000_000
"""Entries, which FFmpeg has 24 bytes or more for."""


def box(kind: bytes, *payload: bytes) -> bytes:
    """A box of MP4 or QuickTime."""
    content = b"".join(payload)
    return struct.pack(">I4s", len(content) + 8, kind) + content


def table(kind: bytes, *fields: int, form: str = "I", before: bytes = bytes(4)) -> bytes:
    """A box with numbers behind its version and flags."""
    return box(kind, before, *(struct.pack(">" + form, each) for each in fields))


def movie(*tables: bytes, edits: bytes = b"", format_: bytes = b"sowt", media: int = 2000) -> bytes:
    """A file with one track that has these tables, and those that it needs.

    Args:
        edits: a box ``edts``.
        format_: of its samples: a sound's, or ``mp4v``.
        media: bytes of them.
    """
    sounds = format_ != b"mp4v"
    given = {each[4:8] for each in tables}
    needed = {
        b"stts": table(b"stts", 1, media, 1),
        b"stsc": table(b"stsc", 1, 1, media, 1),
        b"stsz": table(b"stsz", 1, media),
        b"stco": table(b"stco", 1, 36),
    }
    if sounds:
        entry = box(format_, bytes(6), struct.pack(">HQHHHHI", 1, 0, 1, 16, 0, 0, 8000 << 16))
    else:
        size = struct.pack(">HH", 64, 48)
        entry = box(format_, bytes(6), struct.pack(">H", 1), bytes(16), size, bytes(50))
    stbl = box(
        b"stbl",
        box(b"stsd", struct.pack(">II", 0, 1), entry),
        *(made for kind, made in needed.items() if kind not in given),
        *tables,
    )
    handler = box(b"hdlr", bytes(8), b"soun" if sounds else b"vide", bytes(13))
    header = table(b"mdhd", 0, 0, 8000, 4000, 0)
    inside = box(b"mdia", header, handler, box(b"minf", stbl))
    track = box(b"trak", table(b"tkhd", 0, 0, 1, 0, 4000, *[0] * 15), edits, inside)
    start = table(b"mvhd", 0, 0, 1000, 4000, *[0] * 20)
    first = box(b"ftyp", b"isom\0\0\2\0isommp41")
    return first + box(b"mdat", bytes(media)) + box(b"moov", start, track)


def chunks(count: int, samples: int) -> bytes:
    """Chunks that hold so many samples each, of which there is one byte."""
    return movie(
        table(b"stsc", 1, 1, samples, 1),
        table(b"stco", count, *[36] * count),
        table(b"stsz", 1, min(count * samples, 2**32 - 1)),
        table(b"stts", 1, min(count * samples, 2**32 - 1), 1),
    )


def edited(edits: int, samples: int) -> bytes:
    """A film that shows all of itself again and again, by its edit list."""
    entry = struct.pack(">IiI", 4000, 0, 1 << 16)
    times = box(b"edts", box(b"elst", struct.pack(">II", 0, edits), entry * edits))
    return movie(
        table(b"stsz", 1, samples),
        table(b"stsc", 1, 1, samples, 1),
        table(b"stts", 1, samples, 1),
        edits=times,
        format_=b"mp4v",
        media=samples,
    )


def grouped(groups: int) -> bytes:
    """A film that describes so many groups of samples."""
    form = struct.pack(">I4sII", 1 << 24, b"sync", 1, groups)
    return movie(box(b"sgpd", form, bytes(80)), format_=b"mp4v")


def run(samples: int) -> bytes:
    """A fragment with so many samples, of which nothing is said."""
    head = box(b"tfhd", struct.pack(">II", 0x20000, 0))
    inside = box(b"traf", head, box(b"trun", struct.pack(">II", 0, samples)))
    return movie(format_=b"mp4v") + box(b"moof", box(b"mfhd", bytes(8)), inside)


def keyframes(count: int) -> bytes:
    """An FLV file that says where so many frames are."""
    positions = b"".join(
        struct.pack(">H", len(name)) + name + b"\x0a" + struct.pack(">I", count) + bytes(9 * 100)
        for name in (b"times", b"filepositions")
    )
    event = b"\x02\0\x0aonMetaData\x08\0\0\0\1\0\x09keyframes\x03" + positions + b"\0\0\x09" * 2
    tags = b"".join(
        bytes([kind]) + len(data).to_bytes(3, "big") + bytes(7) + data
        + struct.pack(">I", len(data) + 11)
        for kind, data in ((18, event), (9, b"\x12" + bytes(50)))
    )  # fmt: skip
    return b"FLV\x01\x05\0\0\0\x09" + bytes(4) + tags


def indexed(frames: int | None = None) -> bytes:
    """An MXF file with an index of so many frames."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mxf") as file:
        stream = file.add_stream("mpeg2video", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for n in range(30):
            picture = np.full((48, 64, 3), n, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())
    data = bytearray(buffer.getvalue())
    at = data.find(b"\x3f\x0c\x00\x08")
    while frames is not None and at >= 0:
        struct.pack_into(">Q", data, at + 4, frames)
        at = data.find(b"\x3f\x0c\x00\x08", at + 4)
    return bytes(data)


def listed(kind: bytes, *numbers: int, form: str) -> bytes:
    """A film with metadata that begin a list of so many names or pictures, and end there."""
    handler = box(b"hdlr", bytes(8), b"mdta", bytes(13))
    fields = struct.pack(">" + form, *numbers)
    return movie(format_=b"mp4v") + box(b"meta", bytes(4), handler, box(kind, fields, bytes(40)))


def tracks(*lists: int) -> bytes:
    """A Matroska file with lists of so many tracks, of which nothing is said."""
    head = b"\x1a\x45\xdf\xa3\x87\x42\x82\x84webm"
    inside = b"".join(
        b"\x16\x54\xae\x6b\x01" + (2 * count).to_bytes(7, "big") + b"\xae\x80" * count
        for count in lists
    )
    return head + b"\x18\x53\x80\x67\x01" + len(inside).to_bytes(7, "big") + inside


def hostile() -> Mapping[str, bytes]:
    """All of them."""
    repeated = table(b"stts", 2, MANY // 2, 1, MANY // 2, 1)
    return {
        "chunks of plain sound": chunks(20, 2_000_000_000),
        "the same, QuickTime's first box unbounded": unbounded(chunks(20, 2_000_000_000)),
        "edits": edited(3700, 4000),
        "samples of one size": movie(
            table(b"stsz", 1, MANY), table(b"stsc", 1, 1, MANY, 1), table(b"stts", 1, MANY, 2)
        ),
        "samples of 4 bits": movie(box(b"stz2", struct.pack(">III", 0, 4, MANY)), repeated),
        "samples that take two times": movie(table(b"stsz", 1, MANY), repeated),
        "groups": grouped(0x1FFFFFFF),
        "a run": run(MANY),
        "keyframes": keyframes(0x0FFFFFF0),
        "an index": indexed(200_000_000),
        "names": listed(b"keys", 0, MANY - 10**6, form="II"),
        "pictures": listed(b"iinf", 1 << 24, MANY - 10**6, form="II"),
        "places of pictures": listed(b"iloc", 2 << 24, 0, MANY - 10**6, form="IHI"),
        "tracks": tracks(500_000),
        "tracks in many lists": tracks(*[900] * 500),
    }


def unbounded(data: bytes) -> bytes:
    """The film as the one box ``moov``, which is longer than the file."""
    at = data.index(b"moov") - 4
    return b"\x7f\xff\xff\xffmoov" + data[at + 8 :]
