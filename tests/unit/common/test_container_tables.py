"""A few kilobytes that would make FFmpeg take gigabytes to open them."""

import ctypes
import io
import re
import struct
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, VideoMediaIO

from common.media import container_tables
from common.media.container_tables import claims_too_much
from common.media.decoder_guard import MAX_FFMPEG_BYTES, guard_decoders
from frontend.fetch.content import Content
from frontend.fetch.decoders import decode
from frontend.media_limits.policy import FetchPolicy, RefusedError
from tests.clips import film, sound
from tests.e2e.processes import run_python
from tests.fakes.budget import anything
from tests.hostile_films import (
    box,
    chunks,
    edited,
    hostile,
    indexed,
    keyframes,
    listed,
    movie,
    table,
    tracks,
)
from tests.hostile_media import quicktime


def claiming(samples: int) -> bytes:
    """A film with so many samples of a byte each, all of them in its one chunk."""
    data = bytearray(film("many"))
    struct.pack_into(">II", data, data.index(b"stsz") + 8, 1, samples)
    struct.pack_into(">I", data, data.index(b"stsc") + 16, samples)
    struct.pack_into(">I", data, data.index(b"stts") + 12, samples)
    return bytes(data)


@pytest.mark.parametrize("reader", [VideoMediaIO(ImageMediaIO()), AudioMediaIO()])
def test_a_table_of_what_is_not_there(reader: MediaIO[Any]) -> None:
    with pytest.raises(RefusedError, match="more samples than it can hold"):
        decode(Content.of(claiming(20_000_000)), reader, FetchPolicy(), anything)


def test_wherever_the_table_is() -> None:
    table = box(b"stsz", struct.pack(">III", 0, 1, 20_000_000))
    run = box(b"trun", struct.pack(">II", 0, 20_000_000))
    start = box(b"ftyp", b"isom\0\0\0\0")
    for hidden in (table, run, box(b"cmov", bytes(8))):
        for around in (b"moov", b"moof", b"udta", b"free"):
            assert claims_too_much(start + box(around, box(b"trak", hidden)))
        assert claims_too_much(start + b"\0\0\0\0moov" + hidden)
        long = struct.pack(">I4sQ", 1, b"moov", 16 + len(hidden)) + hidden
        assert claims_too_much(start + long)
        assert not claims_too_much(start + box(b"mdat", hidden))
        assert claims_too_much(struct.pack(">I4s", 0x7FFFFFFF, b"moov") + hidden)
    many = box(b"trun", struct.pack(">II", 0, 100)) * 10
    assert claims_too_much(start + box(b"moof", many))


def fragmented() -> bytes:
    buffer = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov"}
    with av.open(buffer, "w", format="mp4", options=options) as file:
        stream: Any = file.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for n in range(100):
            frame = np.full((48, 64, 3), n, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize("name", hostile())
def test_tables_that_repeat_what_is_not_there(name: str) -> None:
    assert claims_too_much(hostile()[name])


OPENERS = {
    "PyAV": "import av\nav.open(BytesIO(data)).close()",
    "OpenCV": (
        "import cv2\nopened = cv2.VideoCapture(BytesIO(data), cv2.CAP_FFMPEG, [])\n"
        "assert not opened.isOpened(), 'opened'"
    ),
    "vLLM's loader of sound": (
        "from vllm.multimodal.media.audio import load_audio\nload_audio(BytesIO(data), sr=16000)"
    ),
}
GUARDED = """
import os, sys
from io import BytesIO
from common.media.decoder_guard import guard_decoders
from tests.hostile_films import hostile

guard_decoders()

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024
"""
WATCHED = """
if os.fork() == 0:
    {imports}
    before = peak()
    for name, data in hostile().items():
        try:
{opens}
        except (ValueError, OSError):
            pass
        else:
            sys.exit(name + " was opened by {opener}")
        if peak() - before > 100:
            sys.exit(f"{opener}: {{name}}: {{peak() - before}} MiB")
    os._exit(0)
"""


def test_they_take_no_memory_whoever_opens_them() -> None:
    """Each by a process of its own, whose memory nobody else has a share in."""
    script = GUARDED
    for opener, lines in OPENERS.items():
        imports, opens = lines.split("\n", 1)
        opens = textwrap.indent(opens, 12 * " ")
        script += WATCHED.format(opener=opener, imports=imports, opens=opens)
    script += f"sys.exit(any([os.wait()[1] for _ in range({len(OPENERS)})]))"
    ran = run_python("-c", script)
    assert ran.returncode == 0, ran.stdout[-2000:]


def test_no_piece_of_ffmpegs_memory_is_larger_than_a_medium() -> None:
    guard_decoders()
    lines = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split(maxsplit=5)[-1] for line in lines if "libavutil" in line}
    assert len(libraries) == 2  # PyAV's, OpenCV's
    for path in libraries:
        allocate = ctypes.CDLL(path).av_malloc
        allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
        assert allocate(MAX_FFMPEG_BYTES + 1) is None


def plain_sound(seconds: int) -> bytes:
    """With one chunk for all of it, as some programs write it."""
    count = 8000 * seconds
    return movie(
        table(b"stsz", 1, count), table(b"stsc", 1, 1, count, 1), table(b"stts", 1, count, 1),
        media=count,
    )  # fmt: skip


def test_honest_files_pass() -> None:
    for data in (plain_sound(600), chunks(20, 50), edited(3, 4000), keyframes(100), indexed()):
        assert not claims_too_much(data)
    together = plain_sound(600)
    track = together[together.index(b"trak") - 4 :]
    frames = edited(2, 100)
    frames = frames[frames.index(b"trak") - 4 :]
    moov = box(b"moov", table(b"mvhd", 0, 0, 1000, 4000, *[0] * 20), track, frames)
    both = together[: together.index(b"moov") - 4] + moov
    assert not claims_too_much(both)
    for data in (film("a"), film("a", audible=True), sound("a"), quicktime("x"), fragmented()):
        assert not claims_too_much(data)
    text = listed(
        b"keys", int.from_bytes(b" of ", "big"), int.from_bytes(b"Rome", "big"), form="II"
    )
    for data in (text, listed(b"iinf", 0, 2, form="IH"), tracks(2, 3), film("a") + tracks(999)):
        assert not claims_too_much(data)
    for data in (b"", b"\0", bytes(100), b"\0\0\0\1moov", b"\xff" * 100):
        assert not claims_too_much(data)


@pytest.mark.parametrize(
    "name", ["10 43 a7 70 45 b9", "19 41 a4 69", "1c 53 bb 6b bb", "12 54 c3 67"]
)
def test_lists_of_matroska_have_a_limit(name: str) -> None:
    """FFmpeg keeps 70 bytes for two of a list, within an element of it too."""
    wide = bytes.fromhex("01 ff ff ff ff ff ff ff")  # a size that is not known
    *_, inner = names = [bytes.fromhex(name)[:4], bytes.fromhex(name)[4:]]
    lists = b"".join(each + wide for each in names if each)
    for kind in (b"\xb7", b"\x61\xa7") if not inner else (b"\xb6", b"\xb7"):
        assert claims_too_much(tracks(1) + lists + (kind + b"\x80") * (1 << 18))
        assert not claims_too_much(tracks(1) + lists + (kind + b"\x80") * (1 << 17))


@pytest.mark.parametrize("name", ["keyframes", "tracks"])
def test_a_tag_hides_no_table(name: str) -> None:
    """FFmpeg looks behind it."""
    assert claims_too_much(b"ID3\x03\0\0\0\0\0\x0a" + bytes(10) + hostile()[name])


def test_a_search_gives_others_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 200 MB held the GIL for 7 s, and the event loop waited."""
    monkeypatch.setattr(container_tables, "_PIECE_BYTES", 100)
    data = np.random.default_rng(1).integers(0, 4, 20_000, np.uint8).tobytes()
    asked: list[int] = []

    class Pattern:
        def finditer(self, data: bytes, start: int, end: int) -> Iterator[re.Match[bytes]]:
            asked.append(end - start)
            return pattern.finditer(data, start, end)

    for pattern in (
        re.compile(rb"\x00\x01|\x01\x02\x03"),
        re.compile(rb"\x02.{30}(\x01)", re.DOTALL),
    ):
        found = container_tables._matches(Pattern(), data, 7, 19_900)  # type: ignore[arg-type]
        expected = [each.span() for each in pattern.finditer(data, 7, 19_900)]
        assert [each.span() for each in found] == expected
    assert max(asked) <= 100 + container_tables._MAX_MATCH
