"""Sounds and films for tests: distinct per name, a second or a few long."""

import base64
import io
import wave
from collections.abc import Iterable
from typing import Final

import av
import numpy as np
import numpy.typing as npt
import soundfile  # type: ignore[import-untyped]

from tests.pictures import random_of

RATE = 16_000
"""Samples per second."""
FRAMES_PER_SECOND = 4


def sound(name: str, seconds: float = 1.0) -> bytes:
    """A WAV file of a chord that no other name gives."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((_chord(name, seconds) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def floats(samples: npt.NDArray[np.float32]) -> bytes:
    """A WAV file of samples as they are."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def film(name: str, seconds: int = 2, *, audible: bool = False, heard: str = "") -> bytes:
    """An MP4 file of coloured squares that no other name gives, with a chord if audible: its own or
    that of ``heard``.
    """
    random = random_of(name)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        pictures = file.add_stream("mpeg4", rate=FRAMES_PER_SECOND)
        pictures.width = pictures.height = 112
        pictures.pix_fmt = "yuv420p"
        chord = file.add_stream("aac", rate=RATE, layout="mono") if audible else None
        for _ in range(seconds * FRAMES_PER_SECOND):
            coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            frame = np.kron(coarse, np.ones((28, 28, 1), np.uint8))
            file.mux(pictures.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(pictures.encode())
        if chord is not None:
            for piece in _pieces(_chord(heard or name, seconds)):
                file.mux(chord.encode(piece))
            file.mux(chord.encode())
    return buffer.getvalue()


def data_url(media_type: str, data: bytes) -> str:
    """A data URL."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _chord(name: str, seconds: float) -> npt.NDArray[np.float64]:
    time = np.arange(int(seconds * RATE)) / RATE
    pitches = random_of(name).uniform(100, 4000, 5)
    return np.sin(2 * np.pi * pitches[:, None] * time).sum(axis=0) / 6


def _pieces(samples: npt.NDArray[np.float64]) -> Iterable[av.AudioFrame]:
    for start in range(0, len(samples) - 1023, 1024):
        piece = samples[None, start : start + 1024].astype(np.float32)
        frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout="mono")
        frame.sample_rate = RATE
        frame.pts = start
        yield frame


AV1: Final = {
    container: base64.b64decode(text)
    for container, text in {
        "mp4": (
            "AAAAIGZ0eXBpc29tAAACAGlzb21hdjAxaXNvMm1wNDEAAAAIZnJlZQAAAXltZGF0CgoAAAACr/+NXzAIMhAQ"
            "ALwCCSRBAQAACACVz9iAMhUoCAAkkkkdjABxwwwgAADgABgd9joyFSgEAQSSAB2MAHHDDBAAAGAAGI9m6DIV"
            "KAKEBJJhnYwAccMMEAAAYAAa515AMhIwAwAJJV07GAAAAgAADAAcw3AaAdgyEjAGABVawzsYAAACAAAMABzD"
            "cBoBuDIUKAYkB1MAHYwAccMMEAAAYAAcwT0yEjALAA03RTsYAAACAAAMAB+AIBoB2DISMA4AFeoAOxgAAAIA"
            "AAwAH38gGgGIMhUoDABAQAAdjABxwwwgAADgAAANxIAyFSgKIgDQJJ2MAHHDDBAAAGAAGudeQDISMBJAAaEM"
            "OxgAAAIAAAwAGugUGgHIMhIwFoAQWEk7GAAAAgAADAAffyAaAZgyFCgOAIKJIJ2MAHHDDCAAAOAAADtaMhEw"
            "GkQGApI7GAAAAgAADAChDBoBqDISMB5CCZSSOxgAAAIAAAAAIh6oAAADWW1vb3YAAABsbXZoZAAAAAAAAAAA"
            "AAAAAAAAA+gAAAKAAAEAAAEAAAAAAAAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAQAAAAAAAAAAAAAAAAAAQAAA"
            "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAIAAAKDdHJhawAAAFx0a2hkAAAAAwAAAAAAAAAAAAAAAQAA"
            "AAAAAAKAAAAAAAAAAAAAAAAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAQAAAAAAAAAAAAAAAAAAQAAAAABAAAAA"
            "QAAAAAAAJGVkdHMAAAAcZWxzdAAAAAAAAAABAAACgAAAAAAAAQAAAAAB+21kaWEAAAAgbWRoZAAAAAAAAAAA"
            "AAAAAAAAMgAAACAAVcQAAAAAAC1oZGxyAAAAAAAAAAB2aWRlAAAAAAAAAAAAAAAAVmlkZW9IYW5kbGVyAAAA"
            "AaZtaW5mAAAAFHZtaGQAAAABAAAAAAAAAAAAAAAkZGluZgAAABxkcmVmAAAAAAAAAAEAAAAMdXJsIAAAAAEA"
            "AAFmc3RibAAAAJJzdHNkAAAAAAAAAAEAAACCYXYwMQAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAABAAEAASAAA"
            "AEgAAAAAAAAAAQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABj//wAAABhhdjFDgQAMAAoKAAAA"
            "Aq//gF8ACAAAABRidHJ0AAAAAAAAEgQAABIEAAAAGHN0dHMAAAAAAAAAAQAAABAAAAIAAAAAFHN0c3MAAAAA"
            "AAAAAQAAAAEAAAAcc2R0cAAAAAAgGBAYEBgQGBAYEBgQEBAQAAAAHHN0c2MAAAAAAAAAAQAAAAEAAAAQAAAA"
            "AQAAAFRzdHN6AAAAAAAAAAAAAAAQAAAAHgAAAFkAAAADAAAAFAAAAAMAAAAqAAAAAwAAABQAAAADAAAAQgAA"
            "AAMAAAAUAAAAAwAAACkAAAADAAAAFAAAABRzdGNvAAAAAAAAAAEAAAAwAAAAYnVkdGEAAABabWV0YQAAAAAA"
            "AAAhaGRscgAAAAAAAAAAbWRpcmFwcGwAAAAAAAAAAAAAAAAtaWxzdAAAACWpdG9vAAAAHWRhdGEAAAABAAAA"
            "AExhdmY2Mi4xMi4xMDI="
        ),
        "webm": (
            "GkXfo59ChoEBQveBAULygQRC84EIQoKEd2VibUKHgQJChYECGFOAZwEAAAAAAAN7EU2bdLpNu4tTq4QVSalm"
            "U6yBoU27i1OrhBZUrmtTrIHYTbuMU6uEElTDZ1OsggEuTbuMU6uEHFO7a1OsggNl7AEAAAAAAABZAAAAAAAA"
            "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
            "AAAAAAAAAAAAAAAAAAAAAAAAAAAVSalmsirXsYMPQkBNgI1MYXZmNjIuMTIuMTAyV0GNTGF2ZjYyLjEyLjEw"
            "MkSJiECEAAAAAAAAFlSua9GuAQAAAAAAAEjXgQFzxYgoHsNVjIhHW5yBACK1nIN1bmSIgQCGhVZfQVYxg4EB"
            "I+ODhAJiWgDghrCBQLqBQGOikIEADAAKCgAAAAKv/4BfAAgSVMNn2HNzoGPAgGfImkWjh0VOQ09ERVJEh41M"
            "YXZmNjIuMTIuMTAyc3OyY8CLY8WIKB7DVYyIR1tnyKFFo4hEVVJBVElPTkSHkzAwOjAwOjAwLjY0MDAwMDAw"
            "MAAfQ7Z1QdTngQCjooEAAIAKCgAAAAKv/41fMAgyEBAAvAIJJEEBAAAIAJXP2ICj3YEAKAAyFSgIACSSSR2M"
            "AHHDDCAAAOAAGB32OjIVKAQBBJIAHYwAccMMEAAAYAAYj2boMhUoAoQEkmGdjABxwwwQAABgABrnXkAyEjAD"
            "AAklXTsYAAACAAAMABzDcKOHgQBQABoB2KOYgQB4ADISMAYAFVrDOxgAAAIAAAwAHMNwo4eBAKAAGgG4o66B"
            "AMgAMhQoBiQHUwAdjABxwwwQAABgABzBPTISMAsADTdFOxgAAAIAAAwAH4Ago4eBAPAAGgHYo5iBARgAMhIw"
            "DgAV6gA7GAAAAgAADAAffyCjh4EBQAAaAYijxoEBaAAyFSgMAEBAAB2MAHHDDCAAAOAAAA3EgDIVKAoiANAk"
            "nYwAccMMEAAAYAAa515AMhIwEkABoQw7GAAAAgAADAAa6BSjh4EBkAAaAcijmIEBuAAyEjAWgBBYSTsYAAAC"
            "AAAMAB9/IKOHgQHgABoBmKOtgQIIADIUKA4AgokgnYwAccMMIAAA4AAAO1oyETAaRAYCkjsYAAACAAAMAKEM"
            "o4eBAjAAGgGoo5iBAlgAMhIwHkIJlJI7GAAAAgAAAAAiHqgcU7trkbuPs4EAt4r3gQHxggGL8IED"
        ),
    }.items()
}
"""Four small frames. Made once: as root SVT-AV1, the only encoder here, runs its threads before all
others, and on two busy cores neither it nor anything else goes on."""
