"""Media that are broken, empty, enormous or merely unusual."""

import io
from collections.abc import Callable

import av
import numpy as np
from PIL import Image

from tests.clips import film, sound
from tests.pictures import blank_picture, picture, random_of


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def opened(name: str, size: tuple[int, int] = (96, 64)) -> Image.Image:
    return Image.open(io.BytesIO(picture(name, size)))


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    return encoded(opened("rotated"), "JPEG", exif=exif)


def deep() -> Image.Image:
    values = random_of("deep").integers(0, 65536, (64, 96), dtype=np.uint16)
    return Image.fromarray(values)


def scaled(picture: Image.Image) -> Image.Image:
    """As grey of 8 bits."""
    return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))


def animated(format: str) -> bytes:
    frames = [opened(f"frame-{n}") for n in range(3)]
    if format == "GIF":
        frames = [frame.convert("P") for frame in frames]
    return encoded(frames[0], format, save_all=True, append_images=frames[1:], duration=100)


DEEP = frozenset({"16 bit", "16 bit TIFF"})
"""Of the pictures, those with more than 8 bits."""

IMAGES: dict[str, Callable[[], bytes]] = {
    "zero bytes": lambda: b"",
    "truncated PNG": lambda: picture("cut")[:2000],
    "truncated JPEG": lambda: encoded(opened("cut", (400, 400)), "JPEG")[:3000],
    "only a header": lambda: picture("cut")[:40],
    "text": lambda: b"this is no picture at all",
    "bomb": lambda: blank_picture(20_000),
    "CMYK": lambda: encoded(opened("cmyk").convert("CMYK"), "JPEG"),
    "palette": lambda: encoded(opened("palette").convert("P"), "PNG"),
    "palette with transparency": lambda: encoded(
        opened("palette").convert("P"), "PNG", transparency=3
    ),
    "16 bit": lambda: encoded(deep(), "PNG"),
    "16 bit TIFF": lambda: encoded(deep(), "TIFF"),
    "float TIFF": lambda: encoded(opened("float").convert("F"), "TIFF"),
    "one bit": lambda: encoded(opened("bit").convert("1"), "PNG"),
    "grey with alpha": lambda: encoded(opened("grey").convert("LA"), "PNG"),
    "RGBA": lambda: encoded(opened("rgba").convert("RGBA"), "PNG"),
    "animated GIF": lambda: animated("GIF"),
    "animated PNG": lambda: animated("PNG"),
    "animated WebP": lambda: animated("WEBP"),
    "EXIF rotated": rotated,
    "1x10000": lambda: picture("column", (1, 10_000)),
    "10000x1": lambda: picture("row", (10_000, 1)),
    "1x1": lambda: picture("dot", (1, 1)),
    "a video": lambda: film("not a picture"),
}


def only_sound() -> bytes:
    """An MP4 file without any picture."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate, frame.pts = 16_000, 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


VIDEOS: dict[str, Callable[[], bytes]] = {
    "zero bytes": lambda: b"",
    "no frames": only_sound,
    "truncated": lambda: film("cut")[:-200],
    "cut in half": lambda: film("cut")[: len(film("cut")) // 2],
    "only a header": lambda: film("cut")[:40],
    "text": lambda: b"this is no video at all",
    "a picture": lambda: picture("not a video"),
    "one second": lambda: film("short", 1),
}

AUDIO: dict[str, Callable[[], bytes]] = {
    "zero bytes": lambda: b"",
    "no samples": lambda: sound("silent", 0.0),
    "one sample": lambda: sound("click", 1 / 16_000),
    "very short": lambda: sound("blip", 0.01),
    "truncated": lambda: sound("cut")[:-1001],
    "only a header": lambda: sound("cut")[:20],
    "text": lambda: b"this is no sound at all",
    "a picture": lambda: picture("not a sound"),
    "a video without sound": lambda: film("mute"),
    "a video with sound": lambda: film("loud", audible=True),
    "longer than the model listens": lambda: sound("long", 20.0),
}
