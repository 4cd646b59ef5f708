"""Parts of a message: good media, broken ones, and text that looks like a medium."""

import base64
import io
import random
from collections.abc import Callable

import numpy as np

from tests import odd_headers, odd_media
from tests.clips import data_url, film, sound
from tests.families.questions import Part, words
from tests.pictures import data_uri, picture

SIDES = (1, 2, 3, 7, 13, 27, 28, 29, 55, 56, 57, 100, 224, 333, 640, 1500)
SPECIAL = (
    "<image>", "<video>", "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|vision_start|>",
    "<|vision_end|>", "<|AUDIO|>", "<|audio_start|>", "<|audio_end|>", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<row_1_col_1>", "<global-img>", "<fake_token_around_image>",
    "<start_of_image>", "<image_soft_token>", "<IMG_CONTEXT>", "\x00", "\ud800", "\U0001f4a9",
)  # fmt: skip
WRONG_TYPES = ("image/png", "video/mp4", "audio/wav", "text/plain", "image/svg+xml", "", "a;b,c")

Draw = random.Random


def _encoded(media_type: str, data: bytes) -> str:
    return data_url(media_type, data)


def image_part(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def _image(draw: Draw) -> Part:
    size = (draw.choice(SIDES), draw.choice(SIDES))
    return image_part(data_uri(picture(f"fuzz-{draw.randrange(20)}", size)))


def _odd_image(draw: Draw) -> Part:
    name = draw.choice([name for name in odd_media.IMAGES if name != "bomb"])
    return image_part(_encoded("image/png", odd_media.IMAGES[name]()))


def _video(draw: Draw) -> Part:
    clip = film(f"fuzz-{draw.randrange(10)}", draw.choice((1, 2, 5)), audible=draw.random() < 0.5)
    return {"type": "video_url", "video_url": {"url": _encoded("video/mp4", clip)}}


def _odd_video(draw: Draw) -> Part:
    clip = draw.choice([*odd_media.VIDEOS.values(), *odd_headers.FILMS.values()])()
    return {"type": "video_url", "video_url": {"url": _encoded("video/mp4", clip)}}


def _sound(draw: Draw) -> Part:
    seconds = draw.choice((0.0, 1 / 16_000, 0.001, 0.02, 0.1, 1.0, 3.0, 29.9, 30.1, 40.0))
    clip = sound(f"fuzz-{draw.randrange(10)}", seconds)
    return {"type": "audio_url", "audio_url": {"url": _encoded("audio/wav", clip)}}


def _odd_sound(draw: Draw) -> Part:
    clip = draw.choice([*odd_media.AUDIO.values(), *odd_headers.SOUNDS.values()])()
    if draw.random() < 0.5:
        data = base64.b64encode(clip).decode()
        format = draw.choice(("wav", "mp3", "flac", "nothing"))
        return {"type": "input_audio", "input_audio": {"data": data, "format": format}}
    return {"type": "audio_url", "audio_url": {"url": _encoded("audio/wav", clip)}}


def _wrong_kind(draw: Draw) -> Part:
    """One medium in the place of another, under a third one's type."""
    data = draw.choice((picture("wrong"), film("wrong", 1), sound("wrong", 0.1), b"", b"words"))
    kind = draw.choice(("image_url", "video_url", "audio_url"))
    url = f"data:{draw.choice(WRONG_TYPES)};base64,{base64.b64encode(data).decode()}"
    return {"type": kind, kind: {"url": url}}


def _tensor(draw: Draw) -> Part:
    """Embeddings of a wrong shape, or no tensor at all."""
    import torch

    shape = draw.choice(((1, 128), (16, 128), (0, 128), (4, 4, 128), (3,), (7, 64), (1,), ()))
    kind = draw.choice((torch.float32, torch.float16, torch.int64, torch.complex64, torch.bool))
    buffer = io.BytesIO()
    value = draw.choice((1, 0, float("nan"), float("inf")))
    if not kind.is_floating_point:
        value = 1
    torch.save(torch.full(shape, value, dtype=kind), buffer)
    data = draw.choice((buffer.getvalue(), buffer.getvalue()[:50], b"", np.zeros(4).tobytes()))
    return {"type": "image_embeds", "image_embeds": base64.b64encode(data).decode()}


def _text(draw: Draw) -> Part:
    return words(draw.choice(("What is this?", "", " ", "\n", "river " * 50, "x" * 5000)))


def _special(draw: Draw) -> Part:
    several = draw.choices(SPECIAL, k=draw.choice((1, 2, 5, 40)))
    return words(draw.choice(("", " ")).join(several))


def _named(draw: Draw) -> Part:
    """A medium under a name of the client's, which may lack the medium."""
    part = draw.choice((_image, _odd_image))(draw) | {"uuid": f"name-{draw.randrange(3)}"}
    return (
        {"type": "image_url", "image_url": None, "uuid": "name-1"} if draw.random() < 0.3 else part
    )


GARBLED: tuple[Part, ...] = (
    {"type": "image_url"},
    {"type": "image_url", "image_url": 7},
    {"type": "nothing", "nothing": {}},
    {"type": "image_url", "image_url": {"url": ""}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
    {"type": "audio_url", "audio_url": {"url": "data:,"}},
    {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA"}},
    {},
)


def _garbled(draw: Draw) -> Part:
    return draw.choice(GARBLED)


MAKERS: dict[Callable[[Draw], Part], int] = {
    _image: 8, _odd_image: 6, _video: 4, _odd_video: 5, _sound: 4, _odd_sound: 5,
    _wrong_kind: 3, _tensor: 3, _text: 6, _special: 6, _named: 2, _garbled: 1,
}  # fmt: skip


def part(draw: Draw) -> Part:
    """Any of these."""
    (maker,) = draw.choices(list(MAKERS), list(MAKERS.values()))
    return maker(draw)
