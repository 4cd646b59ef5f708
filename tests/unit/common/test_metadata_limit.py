"""Titles by the ten thousand, each of which FFmpeg compares with all before it."""

import contextlib
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import av
import numpy as np
import pytest
import soundfile  # type: ignore[import-untyped] # it has no types
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO

from common.media import decoder_guard
from common.media.container_tables import MAX_ENTRIES, has_too_much_metadata
from common.media.decoder_guard import guard_decoders
from frontend.fetch.content import Content
from frontend.fetch.decoders import decode
from frontend.media_limits.policy import FetchPolicy, RefusedError
from tests.clips import film, sound
from tests.fakes.budget import anything
from tests.recordings import FORMATS, recording

Make = Callable[[int], bytes]


def names(count: int) -> Iterator[bytes]:
    return (f"{number:05}".encode() for number in range(count))


def element(name: bytes, content: bytes) -> bytes:
    return name + struct.pack(">Q", len(content) | 1 << 56) + content


def matroska(list_: bytes) -> bytes:
    return element(b"\x1a\x45\xdf\xa3", element(b"\x42\x82", b"webm")) + element(
        b"\x18\x53\x80\x67", list_
    )


def titles(count: int) -> bytes:
    made = (element(b"\x67\xc8", element(b"\x45\xa3", name)) for name in names(count))
    return matroska(element(b"\x12\x54\xc3\x67", element(b"\x73\x73", b"".join(made))))


def chapters(count: int) -> bytes:
    made = (element(b"\xb6", element(b"\x73\xc4", name)) for name in names(count))
    return matroska(element(b"\x10\x43\xa7\x70", element(b"\x45\xb9", b"".join(made))))


def comments(count: int) -> bytes:
    return struct.pack("<II", 0, count) + b"".join(
        b"\x07\0\0\0" + name + b"=x" for name in names(count)
    )


def flac(count: int) -> bytes:
    made = comments(count)
    info = bytes(10) + (48_000 << 44 | 15 << 36).to_bytes(8, "big") + bytes(16)
    blocks = b"\0" + len(info).to_bytes(3, "big") + info
    return b"fLaC" + blocks + b"\x84" + len(made).to_bytes(3, "big") + made + bytes(100)


def ogg(count: int) -> bytes:
    """Only pages: FFmpeg wants checksums."""
    made, pages = b"OpusTags" + comments(count), b""
    for start in range(0, len(made), 255 * 255):
        piece = made[start : start + 255 * 255]
        lacing = b"\xff" * (len(piece) // 255) + bytes(
            [len(piece) % 255] if len(piece) < 255**2 else []
        )
        pages += b"OggS\0\0" + bytes(20) + bytes([len(lacing)]) + lacing + piece
    return pages


def tagged(frames: bytes) -> bytes:
    size = bytes(len(frames) >> shift & 127 for shift in (21, 14, 7, 0))
    return b"ID3\x04\0\0" + size + frames + 20 * (b"\xff\xfb\x90\x64" + bytes(413))


def private(count: int) -> bytes:
    return tagged(b"".join(b"PRIV\0\0\0\x06\0\0" + name + b"\0" for name in names(count)))


def read_one_by_one(count: int) -> bytes:
    """Titles that FFmpeg compares while it reads."""
    return tagged(named(count))


def named(count: int) -> bytes:
    return b"".join(b"TXXX\0\0\0\x08\0\0\0" + name + b"\0x" for name in names(count))


def packed_chapter(count: int) -> bytes:
    chapter = b"c\0" + bytes(16) + named(count)
    packed = len(chapter).to_bytes(4, "big") + zlib.compress(chapter)
    return tagged(b"CHAP" + struct.pack(">I", len(packed)) + b"\0\x88" + packed)


def odd(count: int) -> bytes:
    return tagged(b"".join(b"RVA2\0\0\0\x01\0\0" + name[:1] for name in names(count)))


def odd_of_three_letters(count: int) -> bytes:
    frames = b"TT2\0\0\x01\x07" * count
    return tagged(frames).replace(b"\x04", b"\x02", 1)


def in_wav(sound: bytes) -> bytes:
    """A WAV with an MP3 in it."""
    form = struct.pack("<HHIIHHHHIHHH", 85, 2, 44_100, 16_000, 1, 0, 12, 1, 2, 417, 1, 1393)
    chunks = b"".join(
        kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
        for kind, data in ((b"fmt ", form), (b"fact", bytes(4)), (b"data", sound))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


LOGGED: Final[Mapping[str, Make]] = {
    "odd frames": odd,
    "odd frames of three letters": odd_of_three_letters,
    "in a WAV": lambda count: in_wav(odd(count)),
}


@pytest.mark.parametrize("name", LOGGED)
def test_what_libsndfile_writes_on_the_log_is_counted(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    few, many = map(LOGGED[name], (4_096, 4_097))
    assert not has_too_much_metadata(few) and has_too_much_metadata(many)
    with contextlib.suppress(soundfile.LibsndfileError):
        soundfile.SoundFile(io.BytesIO(few)).close()
    assert capfd.readouterr().err.count("libmpg123/id3.c") >= 4_096


COUNTED: Final[Mapping[str, Make]] = {
    "Matroska's titles": titles,
    "Matroska's chapters": chapters,
    "FLAC": flac,
    "FLAC behind a tag": lambda count: b"ID3\4\0\0\0\0\0\0" + flac(count),
    "Ogg": ogg,
    "ID3": private,
    "ID3, which libsndfile reads": read_one_by_one,
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_compared_after_it_is_read_is_counted(name: str) -> None:
    assert not has_too_much_metadata(COUNTED[name](100))
    bomb = COUNTED[name](4 * MAX_ENTRIES)
    assert has_too_much_metadata(bomb)
    for media_io in (AudioMediaIO(), VideoMediaIO(ImageMediaIO())):
        with pytest.raises(RefusedError, match="too many titles"):
            decode(Content.of(bomb), media_io, FetchPolicy(), anything)
    guard_decoders()
    with pytest.raises(ValueError, match="too many titles"):
        av.open(io.BytesIO(bomb))


def test_what_is_compared_while_it_is_read_ends_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard_decoders()
    many = read_one_by_one(3_000)
    with av.open(io.BytesIO(many)) as whole:
        assert len(whole.metadata) == 3_000
    monkeypatch.setattr(decoder_guard, "OPENING_S", -1.0)
    with pytest.raises((ValueError, av.error.FFmpegError)):
        av.open(io.BytesIO(many))
    with pytest.raises(ValueError, match="too long to open"):
        decode(Content.of(film("x")), VideoMediaIO(ImageMediaIO()), FetchPolicy(), anything)


def test_tags_have_a_limit() -> None:
    """A million empty ones, of 11 MB, took a thread 4 s to look through."""
    tag = tagged(b"")[:10] + b"x"
    assert not has_too_much_metadata(tag * 4_096) and has_too_much_metadata(tag * 4_097)


def test_a_compressed_chapter_hides_its_titles() -> None:
    assert has_too_much_metadata(packed_chapter(1))


def test_a_cover_is_one_comment() -> None:
    cover = b"\x08\0\x40\0" + b"cover=" + b"x" * 0x40_0002
    made = flac(100).replace(b"\x07\0\0\x0000001=x", cover)
    size = len(made) - 46 - 100
    assert not has_too_much_metadata(made[:43] + size.to_bytes(3, "big") + made[46:])
    page = b"OggS\0\0" + bytes(20) + b"\xff" + b"\xff" * 255
    assert not has_too_much_metadata(ogg(100) + 64 * (page + b"x" * 255 * 255))
    several = 64 * (page + (b"x" * 251 + b"\0\1\0\0") * 255)
    assert has_too_much_metadata(ogg(100) + several)


def test_samples_are_no_frames_of_a_tag() -> None:
    buffer = io.BytesIO()
    one_sided = np.zeros((5_000, 2), np.int32)
    one_sided[:, 0] = 0x41_41_41_00
    soundfile.write(buffer, one_sided, 48_000, format="WAV", subtype="PCM_24")
    assert not has_too_much_metadata(buffer.getvalue())


def test_what_is_sent_every_day_has_not_too_much() -> None:
    for data in (sound("x"), film("x", audible=True)):
        assert not has_too_much_metadata(data)
    for name, format_ in FORMATS.items():
        assert not has_too_much_metadata(recording("x", format_, 16_000)), name
