"""Texts that name files and addresses are no media, and nothing that they name is opened."""

import base64
import io
import re
import struct
import sys
import wave
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile  # type: ignore[import-untyped] # it has no types
import vllm
from PIL import Image, PngImagePlugin
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, VideoMediaIO
from vllm.multimodal.media.audio import load_audio
from vllm.multimodal.video_decoders import torchcodec

from common.media.decoder_guard import guard_decoders
from common.media.formats import is_known_container
from frontend.fetch.content import Content
from frontend.fetch.decoders import decode
from frontend.media_limits.policy import FetchPolicy, RefusedError
from setup.replaced_names import PACKAGES, ROOT
from tests.clips import film, sound
from tests.e2e.processes import run_python
from tests.fakes.budget import anything
from tests.hostile_media import (
    CANARY_FILM,
    CANARY_SOUND,
    free_udp_port,
    naming,
    nobody_connects,
    put_canaries,
    sdp,
)
from tests.opens import Opens, opens_of
from tests.unit.frontend.fetch.videos import encoded_film, video

KINDS = list(naming("x"))
PYAV = re.compile(r"^\s*(import|from) av\b", re.MULTILINE)
DECODES = re.compile(r"[\w()]+\.decode\([^)]*\)")
READERS: dict[str, MediaIO[object]] = {
    "sound": AudioMediaIO(),
    "sound by PyAV": AudioMediaIO(audio_backend="pyav"),
    "sound by TorchCodec": AudioMediaIO(audio_backend="torchcodec"),
    "film": VideoMediaIO(ImageMediaIO()),
    "film, recovering": VideoMediaIO(ImageMediaIO(), frame_recovery=True),
    "picture": ImageMediaIO(),
}


@pytest.fixture(autouse=True)
def guarded() -> None:
    guard_decoders()


@pytest.fixture
def canaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Opens]]:
    monkeypatch.chdir(tmp_path)
    put_canaries(tmp_path)
    with opens_of(tmp_path / CANARY_SOUND) as one, opens_of(tmp_path / CANARY_FILM) as other:
        yield [one, other]


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.parametrize("kind", KINDS)
def test_the_frontend_lets_none_of_them_in(
    kind: str, reader: str, canaries: list[Opens], tmp_path: Path
) -> None:
    with nobody_connects() as port:
        for name in (CANARY_SOUND, CANARY_FILM, str(tmp_path / CANARY_SOUND)):
            data = naming(name, port)[kind]
            with pytest.raises((RefusedError, ValueError)):
                decode(Content.of(data), READERS[reader], FetchPolicy(), anything)
    assert not any(canary.any for canary in canaries)


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.parametrize("kind", KINDS)
def test_the_decoders_themselves_open_nothing_else(
    kind: str, reader: str, canaries: list[Opens]
) -> None:
    """Also where vLLM calls them by a way of its own, and what they read looks harmless."""
    with nobody_connects() as port:
        for name in (CANARY_SOUND, CANARY_FILM):
            with pytest.raises((ValueError, RuntimeError, ImportError)):
                READERS[reader].load_bytes(naming(name, port)[kind])
    assert not any(canary.any for canary in canaries)


@pytest.mark.parametrize("kind", KINDS)
def test_the_route_for_transcriptions_opens_nothing_else(kind: str, canaries: list[Opens]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        load_audio(io.BytesIO(naming(CANARY_SOUND)[kind]), sr=16_000)
    assert not any(canary.any for canary in canaries)


@pytest.mark.parametrize("reader", ["sound", "film"])
def test_a_session_description_opens_no_socket(reader: str) -> None:
    """FFmpeg would listen for 20 s."""
    with free_udp_port() as (port, taken), ThreadPoolExecutor(1) as thread:
        loading = thread.submit(READERS[reader].load_bytes, sdp(port))
        seen = False
        while not loading.done():
            seen = seen or taken()
        assert isinstance(loading.exception(), ValueError)
        assert not seen
    with pytest.raises(RefusedError, match="none of the formats"):
        decode(Content.of(sdp(port)), READERS[reader], FetchPolicy(), anything)


def test_torchcodec_takes_no_orders_so_it_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(ImportError):
        AudioMediaIO(audio_backend="torchcodec").load_bytes(sound("a"))
    with pytest.raises(ValueError, match="use the opencv backend"):
        torchcodec.VideoDecoder(b"")


def encoded_sound(format: str, codec: str, titles: Mapping[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as file:
        file.metadata.update(titles or {})
        stream: Any = file.add_stream(codec, rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 48_000), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate, frame.pts = 48_000, 0
        resampler = av.AudioResampler(stream.format, "mono", 48_000, stream.frame_size or None)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            file.mux(stream.encode(piece))
        file.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("wav", "pcm_s16le"),
        ("mp3", "libmp3lame"),
        ("flac", "flac"),
        ("ogg", "libopus"),
        ("webm", "libopus"),
        ("matroska", "aac"),
        ("mp4", "aac"),
        ("mov", "pcm_s16le"),
        ("adts", "aac"),
        ("aiff", "pcm_s16be"),
        ("caf", "pcm_s16le"),
        ("au", "pcm_s16be"),
        ("mpegts", "aac"),
        ("ac3", "ac3"),
        ("w64", "pcm_s16le"),
    ],
)
def test_sounds_of_all_usual_kinds_are_read_as_before(format: str, codec: str) -> None:
    data = encoded_sound(format, codec)
    ours = decode(Content.of(data), AudioMediaIO(), FetchPolicy(), anything)
    theirs = AudioMediaIO().load_bytes(data)
    assert np.array_equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    assert len(ours[0]) >= 48_000


@pytest.mark.parametrize("format", ["mp4", "mov", "matroska", "avi", "mpegts", "mpeg", "flv"])
def test_films_of_all_usual_kinds_are_read(format: str) -> None:
    buffer = io.BytesIO()
    codec = {"flv": "flv", "mpeg": "mpeg2video"}.get(format, "mpeg4")
    with av.open(buffer, "w", format=format) as file:
        stream: Any = file.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for n in range(10):
            frame = av.VideoFrame.from_ndarray(
                np.full((48, 64, 3), n * 20, np.uint8), format="rgb24"
            )
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    loaded = decode(
        Content.of(buffer.getvalue()), VideoMediaIO(ImageMediaIO()), FetchPolicy(), anything
    )
    assert loaded.media[0].shape[1:] == (48, 64, 3)


def test_a_tag_before_a_sound_is_no_reason_to_refuse_it() -> None:
    tag = b"ID3\x03\0\0\0\0\x01\0" + bytes(128)
    assert is_known_container(tag + encoded_sound("mp3", "libmp3lame"))
    assert is_known_container(tag + tag + sound("a"))
    assert not is_known_container(tag + b"ffconcat version 1.0\n")
    assert not is_known_container(tag)
    assert not is_known_container(b"ID3")


def test_known_containers(tmp_path: Path) -> None:
    assert all(map(is_known_container, (sound("a"), film("a"), video(tmp_path))))
    for data in (b"", b"x", b"RIFF", b"ftyp", b"G" * 100, b"\xff", b"RIFF\0\0\0\0WEBP"):
        assert not is_known_container(data)


def test_a_piece_of_a_stream_is_read() -> None:
    for data in (encoded_sound("mp3", "libmp3lame"), encoded_sound("adts", "aac")):
        for piece in (data[300:], bytes(500) + data):
            samples, _ = decode(Content.of(piece), AudioMediaIO(), FetchPolicy(), anything)
            assert len(samples)
    packets = encoded_sound("mpegts", "aac")
    assert is_known_container(packets[100:])
    timed = b"".join(bytes(4) + packets[at : at + 188] for at in range(0, len(packets), 188))
    samples, _ = decode(Content.of(timed), AudioMediaIO(), FetchPolicy(), anything)
    assert len(samples)


def test_files_of_ones_own_are_written_and_read_as_before(tmp_path: Path) -> None:
    """Only how content from elsewhere is opened is another."""
    path = tmp_path / "x.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(16000))
    with path.open("rb") as opened, av.open(opened) as container:
        assert container.format.name == "wav"


ODD_PLACES = f"""
import contextlib
from {__name__} import *

guard_decoders()
for whole, kind, places in POINTING:
    for start in (whole.index(kind) + place for place in places):
        for number in (0x7FFFFFFF, 0x80000000, 0xFFFF0038, 0xFFFFFFFF):
            for order in ("little", "big"):
                odd = bytearray(whole)
                odd[start : start + 4] = number.to_bytes(4, order)
                reader = VideoMediaIO(ImageMediaIO())
                with contextlib.suppress(RefusedError, ValueError):
                    decode(Content.of(bytes(odd)), reader, FetchPolicy(), anything)
print("survived")
"""


def avi() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as file:
        stream = file.add_stream("mpeg4", rate=25)
        assert isinstance(stream, av.VideoStream)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for grey in range(8):
            frame = np.full((64, 64, 3), grey, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


POINTING = (
    (avi(), b"avih", [4]),
    (avi(), b"strh", [4]),
    (avi(), b"idx1", [4]),
    (film("a"), b"stco", [8, 10, 12, 14]),
    (film("a"), b"stsz", [4, 8, 12]),
    (film("a"), b"mdat", [-4]),
)
"""Films, the name of a table in each, and where numbers stand behind it."""


def test_films_that_point_outside_of_themselves() -> None:
    """One of a kilobyte ended the process: OpenCV does not survive it where a seek fails."""
    ran = run_python("-c", ODD_PLACES)
    assert ran.stdout.endswith("survived\n"), ran.stdout[-3000:]
    assert "@ 0x" not in ran.stdout, "FFmpeg writes what it finds wrong with a client's film"
    assert "global cap" not in ran.stdout, "so does OpenCV"


def seeking_for_ever() -> bytes:
    """An ASF file of unknown objects, the last of which ends behind the file."""
    head = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c") + bytes(14)
    sizes = (104, 46, 100, 43)
    return head + b"".join(
        bytes(16) + size.to_bytes(8, "little") + bytes(size - 24) for size in sizes
    ) + bytes(5)  # fmt: skip


def test_a_film_that_makes_opencv_seek_for_ever() -> None:
    """One took 2 GB that never came back, since OpenCV keeps something of each call."""
    before = sys.getallocatedblocks()
    with pytest.raises(ValueError, match="Could not open"):
        VideoMediaIO(ImageMediaIO()).load_bytes(seeking_for_ever())
    assert sys.getallocatedblocks() - before < 30_000


SURROUND = f"""
from {__name__} import *

guard_decoders()
for reader in READERS["sound"], READERS["sound by PyAV"]:
    samples, rate = decode(Content.of(surround()), reader, FetchPolicy(), anything)
    assert rate == 48_000 and abs(samples).max() < 0.6, rate
    assert abs(len(samples) - 48_000) < 5_000, len(samples)
samples, _ = load_audio(io.BytesIO(surround()), sr=16_000)
assert abs(len(samples) - 16_000) < 2_000, len(samples)
print("survived")
"""


def surround() -> bytes:
    """A second of the same tone, half as loud as can be, in eight channels."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="webm") as file:
        stream: Any = file.add_stream("libopus", rate=48_000, layout="7.1")
        tone = (np.sin(np.arange(960) / 20) / 2).astype(np.float32)
        piece = np.tile(tone[:, None], 8).tobytes()
        for start in range(0, 48_000, 960):
            frame = av.AudioFrame(format="flt", layout="7.1", samples=960)
            frame.planes[0].update(piece)
            frame.sample_rate, frame.pts = 48_000, start
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def test_a_film_of_many_streams_of_pictures() -> None:
    """FFmpeg decodes a frame of each before it has opened the film."""
    film_reader, many = READERS["film"], Content.of(film_of_streams(5))
    assert decode(Content.of(film_of_streams(4)), film_reader, FetchPolicy(), anything)
    for reader in (film_reader, READERS["sound by PyAV"]):
        with pytest.raises(ValueError, match="has 5 streams of pictures: at most 4"):
            decode(many, reader, FetchPolicy(), anything)


@pytest.mark.parametrize(
    ("codec", "pixels", "decoded"), [("cfhd", "yuv422p10le", False), ("mpeg4", "yuv420p", True)]
)
def test_nothing_decodes_a_codec_that_is_not_read(codec: str, pixels: str, decoded: bool) -> None:
    """FFmpeg decodes a frame of each stream to open a film."""
    with av.open(io.BytesIO(encoded_film("mov", codec, 1, pixels))) as film:
        assert (film.streams.video[0].codec_context.pix_fmt is not None) == decoded


def cover() -> bytes:
    """A cover as FLAC and Vorbis have it."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    numbers = struct.pack(">IIIII", 8, 8, 24, 0, len(picture.getvalue()))
    return struct.pack(">II9sI", 3, 9, b"image/png", 0) + numbers + picture.getvalue()


def test_a_sound_of_many_covers() -> None:
    """Covers are streams of pictures too."""
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(8000, np.float32), 8000, format="FLAC")
    head, info, rest = buffer.getvalue()[:4], buffer.getvalue()[5:42], buffer.getvalue()[42:]
    block = b"\x06" + len(cover()).to_bytes(3, "big") + cover()
    reader, few, many = (
        READERS["sound by PyAV"],
        *(Content.of(head + b"\x00" + info + count * block + rest) for count in (16, 17)),
    )
    assert decode(few, reader, FetchPolicy(), anything)
    with pytest.raises(ValueError, match="has 17 streams of covers: at most 16"):
        decode(many, reader, FetchPolicy(), anything)


def test_an_ogg_with_a_cover_ends_no_process() -> None:
    """FFmpeg asserts that the cover is no cover when OpenCV seeks in it."""
    titles = {"METADATA_BLOCK_PICTURE": base64.b64encode(cover()).decode()}
    covered = Content.of(encoded_sound("ogg", "libopus", titles))
    with pytest.raises(ValueError, match="Ogg with a cover"):
        decode(covered, READERS["film"], FetchPolicy(), anything)
    assert decode(covered, READERS["sound by PyAV"], FetchPolicy(), anything)


def film_of_streams(count: int) -> bytes:
    buffer = io.BytesIO()
    grey = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 99, np.uint8), format="rgb24")
    with av.open(buffer, "w", format="mp4") as file:
        streams: list[Any] = [file.add_stream("mpeg4", rate=25) for _ in range(count)]
        for stream in streams:
            stream.width, stream.height = grey.width, grey.height
        for stream in streams:
            file.mux([*stream.encode(grey), *stream.encode()])
    return buffer.getvalue()


def test_a_png_of_many_texts_in_a_film() -> None:
    buffer, named = io.BytesIO(), io.BytesIO()
    texts = PngImagePlugin.PngInfo()
    for number in range(1_001):
        texts.add_text(f"{number}", "x")
    picture = Image.new("RGB", (16, 16))
    picture.save(buffer, "PNG")
    picture.save(named, "PNG", pnginfo=texts)
    guard_decoders()
    for png, refused in ((buffer.getvalue(), False), (named.getvalue(), True)):
        made = io.BytesIO()
        with av.open(made, "w", format="mov") as file:
            stream = file.add_stream("png", rate=1)
            assert isinstance(stream, av.VideoStream)
            stream.width = stream.height = 16
            stream.pix_fmt = "rgb24"
            file.start_encoding()
            packet = av.Packet(png)
            packet.stream, packet.pts, packet.dts = stream, 0, 0
            file.mux(packet)
        with pytest.raises(ValueError, match="many texts") if refused else nullcontext():
            av.open(io.BytesIO(made.getvalue()))


def test_sounds_of_eight_channels() -> None:
    """One ended the process: PyAV reads behind the pointers of its frames."""
    ran = run_python("-c", SURROUND)
    assert ran.stdout.endswith("survived\n"), ran.stdout[-3000:]


@pytest.mark.parametrize("rate", [1, 999, 768_001])
def test_the_route_for_transcriptions_resamples_no_rate_that_no_sound_has(rate: int) -> None:
    """1,300 bytes of 1 Hz took 430 MB and 3 s of a core."""
    data = io.BytesIO()
    soundfile.write(data, np.zeros(600), rate, format="WAV", subtype="PCM_U8")
    with pytest.raises(ValueError, match=f"sample rate of {rate} Hz"):
        load_audio(data, sr=16_000)


def test_nobody_decodes_packet_by_packet() -> None:
    """The frames of ``packet.decode()`` and ``stream.decode()`` pass by the guard of
    ``av.open``: of nine channels they end the process."""
    places = [Path(vllm.__file__).parent, *(ROOT / each for each in PACKAGES)]
    files = (file for place in places for file in place.rglob("*.py"))
    users = [text for file in files if PYAV.search(text := file.read_text())]
    calls = {call for text in users for call in DECODES.findall(text)}
    guarded = {"container.decode(stream)", "_container.decode(*args, **kwargs)"}
    guarded |= {"pictures.decode(packet)", "codec.decode(packet)"}  # of streams without sound
    guarded |= {"super().decode(buffer)"}  # by Pillow
    assert calls == guarded | {'b64encode(data).decode("utf-8")', "name.decode()"}  # of bytes


def test_names_in_another_alphabet_are_no_reason_to_refuse_a_sound() -> None:
    title = b"\0" + "Größe".encode() + b"\xc0\xff"
    frame = b"TIT2" + len(title).to_bytes(4, "big") + b"\0\0" + title
    tag = b"ID3\x03\0\0" + bytes([0, 0, 0, len(frame)]) + frame
    broken = tag.replace(b"\0Gr", b"\3Gr")  # says that it is UTF-8
    data = broken + encoded_sound("adts", "aac")
    samples, _ = decode(Content.of(data), AudioMediaIO(), FetchPolicy(), anything)
    assert len(samples) >= 48_000
