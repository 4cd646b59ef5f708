"""A few kilobytes that would make FFmpeg take gigabytes to open them."""

import io
import struct
from typing import Any

import av
import numpy as np
import pytest
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, VideoMediaIO

from frontend.fetch.content import Content
from frontend.fetch.decoders import decode
from frontend.fetch.sample_tables import claims_too_many_samples
from frontend.media_limits.errors import RefusedError
from frontend.media_limits.policy import FetchPolicy
from tests.clips import film, sound
from tests.fakes.budget import anything
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


def box(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload) + 8) + kind + payload


def test_wherever_the_table_is() -> None:
    table = box(b"stsz", struct.pack(">III", 0, 1, 20_000_000))
    run = box(b"trun", struct.pack(">II", 0, 20_000_000))
    start = box(b"ftyp", b"isom\0\0\0\0")
    for hidden in (table, run, box(b"cmov", bytes(8))):
        for around in (b"moov", b"moof", b"udta", b"free"):
            assert claims_too_many_samples(start + box(around, box(b"trak", hidden)))
        assert claims_too_many_samples(start + b"\0\0\0\0moov" + hidden)
        long = struct.pack(">I4sQ", 1, b"moov", 16 + len(hidden)) + hidden
        assert claims_too_many_samples(start + long)
        assert not claims_too_many_samples(start + box(b"mdat", hidden))
    many = box(b"trun", struct.pack(">II", 0, 100)) * 10
    assert claims_too_many_samples(start + box(b"moof", many))


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


def test_honest_files_pass() -> None:
    for data in (film("a"), film("a", audible=True), sound("a"), quicktime("x"), fragmented()):
        assert not claims_too_many_samples(data)
    for data in (b"", b"\0", bytes(100), b"\0\0\0\1moov", b"\xff" * 100):
        assert not claims_too_many_samples(data)
