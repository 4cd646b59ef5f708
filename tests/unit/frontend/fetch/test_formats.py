"""Formats: what clients send is read, or named, with what to send instead."""

import io
import itertools
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
import soundfile  # type: ignore[import-untyped] # it has no types
from vllm.multimodal.audio import AudioResampler
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, VideoMediaIO
from vllm.multimodal.media.audio import load_audio
from vllm.multimodal.parse import MultiModalDataParser

from common.media import decoder_guard
from common.media.formats import IMAGE_FORMATS, name_of_unread
from frontend.fetch.content import Content
from frontend.fetch.decoders import decode, limit_decoders
from frontend.media_limits import FetchPolicy, RefusedError
from tests import odd_media
from tests.clips import AV1, film
from tests.fakes.budget import anything
from tests.pictures import picture
from tests.recordings import FORMATS, LAYOUTS, by_ffmpeg, pitch_of, recording
from tests.unit.frontend.fetch.videos import encoded_film

POLICY = FetchPolicy()
HEARD = 16_000
"""Hz of most models that listen."""
IMAGE, SOUND = ImageMediaIO(), AudioMediaIO()
FILM = VideoMediaIO(ImageMediaIO(), num_frames=4)


@pytest.fixture(autouse=True)
def limits() -> None:
    limit_decoders(POLICY)


def decoded(data: bytes, media_io: MediaIO[Any]) -> Any:
    return decode(Content.of(data), media_io, POLICY, anything)


# Sounds


@pytest.mark.parametrize("channels", [2, 3, 8])
def test_channels_are_mixed_as_by_vllm(channels: int) -> None:
    """As if all of them were in memory, which they are not."""
    frames = 300_000
    shown = np.random.default_rng(channels).integers(-9999, 9999, (frames, channels), np.int16)
    buffer = io.BytesIO()
    soundfile.write(buffer, shown, 48_000, format="FLAC")
    data = buffer.getvalue()
    tracemalloc.start()
    samples, _ = decoded(data, SOUND)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    buffer.seek(0)
    theirs = np.mean(soundfile.read(buffer, dtype="float32")[0].T, axis=(0,))
    assert np.array_equal(samples, theirs)
    assert peak < 4 * frames + 4 * channels * 200_000


def test_channels_that_ffmpeg_reads_are_mixed_as_by_vllm() -> None:
    """vLLM has all of them in memory, thrice."""
    quiet = np.random.default_rng(0).standard_normal((6, 20 * 48_000)) / 9
    data = FORMATS["M4A"].write(quiet, 48_000)
    tracemalloc.start()
    samples, _ = decoded(data, SOUND)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with decoder_guard._PYAV_OPEN(io.BytesIO(data)) as whole:
        theirs = np.concatenate([each.to_ndarray() for each in whole.decode(audio=0)], axis=-1)
    assert np.array_equal(samples, np.mean(theirs.astype(np.float32), axis=0))
    assert peak < theirs.nbytes


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("container", "codec"),
    [("matroska", "flac"), ("mov", "pcm_s24le"), ("ipod", "alac"), ("avi", "pcm_s16le")],
)
def test_integers_that_ffmpeg_reads_are_scaled(container: str, codec: str, channels: int) -> None:
    """vLLM takes interleaved channels for one that is twice as long, and scales no integers."""
    quiet = np.random.default_rng(0).standard_normal((channels, 48_000)) / 9
    samples, rate = decoded(by_ffmpeg(container, codec)(quiet, 48_000), SOUND)
    assert rate == 48_000
    assert len(samples) == 48_000
    assert np.allclose(samples, quiet.mean(axis=0), atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_a_sound_of_any_rate_is_heard_as_it_was(name: str) -> None:
    for rate, channels in itertools.product(FORMATS[name].rates, (1, 2)):
        data = recording("tone", FORMATS[name], rate, channels)
        samples, own_rate = decoded(data, SOUND)
        theirs, their_rate = load_audio(io.BytesIO(data), sr=None)
        assert np.array_equal(samples, theirs) and own_rate == their_rate
        heard = AudioResampler(HEARD).resample(samples, orig_sr=own_rate)
        # AAC and MP3 begin and end with silence.
        assert 0.97 < len(heard) / HEARD < 1.2, (rate, channels)
        spectrum = np.abs(np.fft.rfft(heard * np.hanning(len(heard))))
        loudest = float(spectrum.argmax()) * HEARD / len(heard)
        assert loudest == pytest.approx(pitch_of("tone"), abs=2), (rate, channels)


def test_what_is_resampled_in_another_way_has_another_hash() -> None:
    """vLLM hashes what the model's processor gets, so no two frontends mean two by one hash."""
    samples = np.sin(np.arange(4_410, dtype=np.float32) / 9)

    def hashed(**options: Any) -> str:
        parser = MultiModalDataParser(target_sr=HEARD, **options)
        (item,) = parser.parse_mm_data({"audio": [(samples, 44_100)]})[
            "audio"
        ].get_all_items_for_hash()
        assert len(item) == 1_600
        return str(MultiModalHasher.hash_kwargs("blake3", audio=item))

    assert hashed() == hashed(audio_resample_method="torchaudio")
    assert hashed() != hashed(audio_resample_method="scipy")


@pytest.mark.parametrize("rate", [8_000, 44_100])
@pytest.mark.parametrize("samples", [1, 2, 5, 100])
def test_a_sound_of_a_few_samples(rate: int, samples: int) -> None:
    found, own_rate = decoded(constant(samples, rate), SOUND)
    assert len(found) == samples and own_rate == rate
    AudioResampler(HEARD).resample(found, orig_sr=own_rate)


def test_a_sound_of_no_samples() -> None:
    """On which vLLM's resampler breaks."""
    with pytest.raises(RefusedError, match="it has no samples"):
        decoded(constant(0, 44_100), SOUND)


def constant(samples: int, rate: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.full(samples, 0.5), rate, format="WAV")
    return buffer.getvalue()


@pytest.mark.parametrize("channels", LAYOUTS)
def test_channels_are_mixed(channels: int) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.tile(np.linspace(0, 0.5, channels), (10, 1)), HEARD, format="WAV")
    found, _ = decoded(buffer.getvalue(), SOUND)
    assert found == pytest.approx(0.25 if channels > 1 else 0, abs=1e-3)


def test_a_sound_whose_codec_nothing_reads() -> None:
    unknown = recording("x", FORMATS["WebM Opus"], 16_000).replace(b"A_OPUS", b"A_NONE")
    with pytest.raises(RefusedError, match=r"^there is no decoder for its codec here: send WAV,"):
        decoded(unknown, SOUND)


# Films


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "mpeg4"),
        ("mp4", "libx264"),
        ("mp4", "libx265"),
        ("webm", "libvpx"),
        ("webm", "libvpx-vp9"),
        ("matroska", "libx264"),
        ("mpegts", "libx264"),
        ("avi", "mpeg4"),
        ("gif", "gif"),
    ],
)
@pytest.mark.parametrize("frames", [1, 8])
def test_a_film_of_few_frames(container: str, codec: str, frames: int) -> None:
    """vLLM alone reads none of one frame, and none of MPEG-TS."""
    data = encoded_film(container, codec, frames, "rgb8" if codec == "gif" else "yuv420p")
    found, about = decoded(data, FILM).media
    assert found.shape == (min(frames, 4), 48, 64, 3)
    assert len(about["frames_indices"]) == min(frames, 4)


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_a_film_whose_codec_opencv_does_not_decode(container: str) -> None:
    with pytest.raises(RefusedError, match=r"none of its frames .* \(codec av1\): send H\.264"):
        decoded(AV1[container], FILM)


def test_a_film_whose_codec_is_unknown() -> None:
    unknown = encoded_film("webm", "libvpx").replace(b"V_VP8", b"V_XXX")
    with pytest.raises(RefusedError, match=r"its codec is unknown\): send H\.264"):
        decoded(unknown, FILM)


def test_a_film_without_pictures() -> None:
    with pytest.raises(RefusedError, match="it has no pictures"):
        decoded(odd_media.only_sound(), FILM)


# What is none of them


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"\0\0\0\x20ftypavif\0\0\0\0", "AVIF"),
        (b"\0\0\0\x20ftypmif1\0\0\0\0mif1avifmiaf", "AVIF"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\xff\x0a", "JPEG XL"),
        (b"8BPS\0\1", "a Photoshop file"),
        (b"%PDF-1.7", "PDF"),
        (b"%!PS-Adobe-3.0", "PostScript"),
        (b"MThd\0\0\0\6", "MIDI"),
        (b".RMF\0", "RealMedia"),
        (b"#EXTM3U\n", "a playlist"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg">', "SVG"),
        (b"\n<!DOCTYPE html><html><body>Log in</body></html>", "a web page (HTML)"),
    ],
)
def test_other_formats_are_named(head: bytes, name: str) -> None:
    pictures = ((IMAGE, "JPEG or PNG"),) if name not in IMAGE_FORMATS else ()
    for media_io, send in (*pictures, (SOUND, "WAV"), (FILM, r"H\.264")):
        expected = rf"^it is {re.escape(name)}, which is not read here: send {send}"
        with pytest.raises(RefusedError, match=expected):
            decoded(head + bytes(200), media_io)


def test_what_is_read_has_no_such_name() -> None:
    read = [recording("x", each, each.rates[0]) for each in FORMATS.values()]
    read += [film("x"), picture("x"), *(make() for make in odd_media.IMAGES.values())]
    assert {name_of_unread(each) for each in read} == {None}
