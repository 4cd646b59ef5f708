"""Films and sounds whose headers claim what their frames and samples don't keep."""

import io
import struct
from collections.abc import Callable, Mapping
from functools import cache

import av
import numpy as np
import soundfile  # type: ignore[import-untyped]

from tests.clips import RATE, film, sound


@cache  # Matroska has an id by chance
def film_in(container: str, frames: int = 8) -> bytes:
    """A film of 4 frames a second, each of another grey."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 112, 112, "yuv420p"
        for number in range(frames):
            pixels = np.full((112, 112, 3), 20 * number, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def patched(data: bytes, mark: bytes, offset: int, value: bytes) -> bytes:
    """Write ``value`` at ``offset`` behind the first ``mark``."""
    start = data.index(mark) + len(mark) + offset
    return data[:start] + value + data[start + len(value) :]


def avi(scale: int, rate: int, length: int = 8, frames: int = 8) -> bytes:
    """``rate / scale`` frames a second, of which it claims ``length``."""
    rates = struct.pack("<II", scale, rate)
    data = patched(film_in("avi", frames), b"strh", 24, rates)
    return patched(data, b"strh", 36, struct.pack("<I", length))


def matroska(frame_ns: int = 250_000_000, duration: float = 2000.0) -> bytes:
    """Frames of some nanoseconds in a film of some milliseconds."""
    data = patched(film_in("matroska"), b"\x44\x89", 1, struct.pack(">d", duration))
    at = data.index(b"\x23\xe3\x83")
    length = data[at + 3] & 0x7F
    return patched(data, b"\x23\xe3\x83", 1, frame_ns.to_bytes(length, "big"))


def mp4(scale: int, delta: int) -> bytes:
    """``scale / delta`` frames a second."""
    data = patched(film_in("mp4"), b"mdhd", 12, struct.pack(">I", scale))
    return patched(data, b"stts", 12, struct.pack(">I", delta))


def turned() -> bytes:
    """A film that is to be shown upside down and 16,384 times as wide."""
    return patched(film_in("mp4"), b"tkhd", 40, struct.pack(">i", 1 << 30))


def edited(start: int, length: int = 0xFFFFFFFF) -> bytes:
    """A film of which a list of edits shows what begins at ``start``."""
    return patched(film_in("mp4"), b"elst", 8, struct.pack(">Ii", length, start))


FILMS: Mapping[str, Callable[[], bytes]] = {
    "a frame each eleven days": lambda: avi(1_000_000, 1),
    "a frame each sixty years": lambda: avi(2**31 - 1, 1),
    "a frame each minute": lambda: avi(60, 1),
    "a frame each two hours": lambda: avi(7200, 1),
    "16,384 frames a second": lambda: avi(1, 16_384),
    "two billion frames a second": lambda: avi(1, 2**31 - 1),
    "no frames a second": lambda: avi(1, 0),
    "frames of no time": lambda: avi(0, 25),
    "200,000 frames claimed": lambda: avi(1, 25, 200_000),
    "four million frames claimed": lambda: avi(1, 25, 4_000_000),
    "four million frames, each of eleven days": lambda: avi(1_000_000, 1, 4_000_000),
    "no frames claimed": lambda: avi(1, 25, 0),
    "one frame": lambda: avi(1, 25, 1, 1),
    "one frame of eleven days": lambda: avi(1_000_000, 1, 1, 1),
    "three frames": lambda: avi(1, 3, 3, 3),
    "Matroska that lasts years": lambda: matroska(duration=1e12),
    "Matroska that lasts no number": lambda: matroska(duration=float("nan")),
    "Matroska that lasts for ever": lambda: matroska(duration=float("inf")),
    "Matroska that lasts less than nothing": lambda: matroska(duration=-5000.0),
    "Matroska with frames of a nanosecond": lambda: matroska(1),
    "Matroska with frames of 4 s": lambda: matroska(2**32 - 1, 20_000.0),
    "MP4 of 4 billion frames a second": lambda: mp4(2**32 - 1, 1),
    "MP4 with a frame each sixty years": lambda: mp4(1, 2**31 - 1),
    "MP4 with time that goes backwards": lambda: mp4(4, 2**32 - 1),
    "MP4 without time": lambda: mp4(0, 0),
    "turned and stretched": turned,
    "edited to before its start": lambda: edited(-1),
    "edited to behind its end": lambda: edited(2**31 - 1),
    "shown for no time": lambda: edited(0, 0),
}


def wav(offset: int, value: bytes) -> bytes:
    """A sound of 0.3 s with other bytes in its format."""
    return patched(sound("headers", 0.3), b"fmt ", offset, value)


@cache  # so has Ogg
def compressed(format: str, samples: int = 4800, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.linspace(-1, 1, samples), rate, format=format)
    return buffer.getvalue()


SOUNDS: Mapping[str, Callable[[], bytes]] = {
    "1 Hz": lambda: wav(8, struct.pack("<I", 1)),
    "7 Hz": lambda: wav(8, struct.pack("<I", 7)),
    "0 Hz": lambda: wav(8, struct.pack("<I", 0)),
    "2 GHz": lambda: wav(8, struct.pack("<I", 2**31 - 1)),
    "4 GHz": lambda: wav(8, struct.pack("<I", 2**32 - 1)),
    "15,999 Hz": lambda: wav(8, struct.pack("<I", 15_999)),
    "no channels": lambda: wav(6, struct.pack("<H", 0)),
    "a thousand channels": lambda: wav(6, struct.pack("<H", 1000)),
    "65,535 channels": lambda: wav(6, struct.pack("<H", 65_535)),
    "4 GB claimed": lambda: patched(sound("claims", 0.3), b"data", 0, b"\xff" * 4),
    "nothing claimed": lambda: patched(sound("claims", 0.3), b"data", 0, b"\x00" * 4),
    "FLAC of 1 Hz": lambda: compressed("FLAC", rate=1),
    "FLAC of 655,350 Hz": lambda: compressed("FLAC", rate=655_350),
    "FLAC of four billion samples": lambda: patched(compressed("FLAC"), b"fLaC", 18, b"\xff" * 4),
    "FLAC of one sample": lambda: compressed("FLAC", 1),
    "Ogg of one sample": lambda: compressed("OGG", 1),
    "Ogg of 8 kHz": lambda: compressed("OGG", rate=8000),
    "MP3 of one sample": lambda: compressed("MP3", 1),
    "a film with frames of eleven days": lambda: avi(1_000_000, 1),
    "sound at no rate": lambda: patched(
        film("mp4a", 1, audible=True), b"mp4a", 24, struct.pack(">I", 0)
    ),
    "sound of an odd rate": lambda: patched(
        film("mp4a", 1, audible=True), b"mp4a", 24, struct.pack(">I", 1 << 16)
    ),
}
