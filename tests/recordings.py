"""Sounds as clients send them: of every rate, number of channels and format."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import av
import numpy as np
import numpy.typing as npt
import soundfile  # type: ignore[import-untyped] # it has no types

from tests.pictures import random_of

Samples = npt.NDArray[np.float64]

RATES: Final = (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000)
"""Samples per second: telephones, old and new files, browsers, studios."""
LAYOUTS: Final = {1: "mono", 2: "stereo", 6: "5.1"}


def pitch_of(name: str) -> float:
    """Hz of the loudest tone of a recording. Telephones carry it too."""
    return float(random_of(name).uniform(300, 1500))


@dataclass(frozen=True)
class Format:
    """A container and a codec.

    Attributes:
        suffix: of a file's name.
        media_type: of a data URL.
        write: encodes samples of each channel at a rate.
        rates: that the codec knows.
    """

    suffix: str
    media_type: str
    write: Callable[[Samples, int], bytes]
    rates: tuple[int, ...] = RATES


def recording(name: str, format: Format, rate: int, channels: int = 1) -> bytes:
    """A second of two tones, the second one of another pitch in each channel."""
    time = np.arange(rate) / rate
    tones = [np.sin(2 * np.pi * pitch_of(f"{name}{extra}") * time) for extra in range(channels)]
    loud = np.sin(2 * np.pi * pitch_of(name) * time)
    return format.write(np.stack([0.6 * loud + 0.1 * tone for tone in tones]), rate)


def cells() -> list[tuple[str, int, int]]:
    """Name a format, a rate and a number of channels: each format with :func:`rates_of`."""
    return [
        (name, rate, 1 + number % 2)
        for name in FORMATS
        for number, rate in enumerate(rates_of(name))
    ]


def rates_of(name: str) -> tuple[int, ...]:
    """Return the lowest, a middle and the highest rate of a format; all rates of the first, since
    what is decoded is resampled in the same way."""
    rates = FORMATS[name].rates
    return rates if name == next(iter(FORMATS)) else (rates[0], rates[len(rates) // 2], rates[-1])


def _by_libsndfile(container: str, encoding: str) -> Callable[[Samples, int], bytes]:
    def write(samples: Samples, rate: int) -> bytes:
        buffer = io.BytesIO()
        soundfile.write(buffer, samples.T, rate, format=container, subtype=encoding)
        return buffer.getvalue()

    return write


def by_ffmpeg(container: str, codec: str) -> Callable[[Samples, int], bytes]:
    def write(samples: Samples, rate: int) -> bytes:
        buffer = io.BytesIO()
        layout = LAYOUTS[len(samples)]
        whole = av.AudioFrame.from_ndarray(samples.astype(np.float32), format="fltp", layout=layout)
        whole.sample_rate, whole.pts = rate, 0
        with av.open(buffer, "w", format=container) as file:
            stream = file.add_stream(codec, rate=rate, layout=layout)
            assert isinstance(stream, av.AudioStream)
            pieces = av.AudioResampler(
                format=stream.format.name, layout=layout, rate=rate, frame_size=stream.frame_size
            )
            for frame in [*pieces.resample(whole), *pieces.resample(None)]:
                file.mux(stream.encode(frame))
            file.mux(stream.encode())
        return buffer.getvalue()

    return write


_OF_OPUS: Final = (8_000, 16_000, 24_000, 48_000)
_OF_MP3: Final = tuple(rate for rate in RATES if rate <= 48_000)

FORMATS: Final = {
    "WAV, 16 bits": Format("wav", "audio/wav", _by_libsndfile("WAV", "PCM_16")),
    "WAV, 24 bits": Format("wav", "audio/wav", _by_libsndfile("WAV", "PCM_24")),
    "WAV, float": Format("wav", "audio/wav", _by_libsndfile("WAV", "FLOAT")),
    "WAV, mu-law": Format("wav", "audio/wav", _by_libsndfile("WAV", "ULAW")),
    "FLAC": Format("flac", "audio/flac", _by_libsndfile("FLAC", "PCM_16")),
    "MP3": Format("mp3", "audio/mpeg", by_ffmpeg("mp3", "libmp3lame"), _OF_MP3),
    "Ogg Vorbis": Format("ogg", "audio/ogg", _by_libsndfile("OGG", "VORBIS")),
    "Ogg Opus": Format("opus", "audio/ogg", by_ffmpeg("ogg", "libopus"), _OF_OPUS),
    "WebM Opus": Format("webm", "audio/webm", by_ffmpeg("webm", "libopus"), _OF_OPUS),
    "AAC": Format("aac", "audio/aac", by_ffmpeg("adts", "aac")),
    "M4A": Format("m4a", "audio/mp4", by_ffmpeg("ipod", "aac")),
}
