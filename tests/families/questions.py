"""What a model is asked, by the media that it takes."""

import base64
import io
import random
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from tests.clips import data_url, film, sound
from tests.pictures import data_uri, picture

Medium = Literal["text", "image", "video", "sound", "embeddings", "other"]
Part = dict[str, object]


def words(text: str) -> Part:
    return {"type": "text", "text": text}


def shown(name: str, size: tuple[int, int] = (224, 168)) -> Part:
    return {"type": "image_url", "image_url": {"url": data_uri(picture(name, size))}}


def seen(name: str) -> Part:
    return {"type": "video_url", "video_url": {"url": data_url("video/mp4", film(name))}}


def heard(name: str, seconds: float = 1.0) -> Part:
    url = data_url("audio/wav", sound(name, seconds))
    return {"type": "audio_url", "audio_url": {"url": url}}


def embedded(name: str, tokens: int = 80) -> Part:
    """As many embeddings as the tiny models have of words, and as wide."""
    import torch

    from tests.families.makers.base import HIDDEN

    generator = torch.Generator().manual_seed(random.Random(name).getrandbits(32))
    buffer = io.BytesIO()
    torch.save(torch.randn(tokens, HIDDEN, generator=generator), buffer)
    return {"type": "prompt_embeds", "data": base64.b64encode(buffer.getvalue()).decode()}


WHAT = words("What is this? Describe it in a few words, then write a short story about it.")
LINES = " ".join(f"Line {n}: the old house near the river, and a white bird." for n in range(9))
LONG, LONGER, AND = words(LINES), words(f"{LINES} {LINES} And then?"), words("and")

Ask = Callable[[str], list[Part]]
"""Makes the parts of a question; media are named after its argument, so that no two ways share
any."""

TEXT: dict[str, Ask] = {
    "text": lambda way: [words(way), LONG, WHAT],
    "text again": lambda way: [words(way), LONG, WHAT],
    "a longer text": lambda way: [words(way), LONGER, WHAT],
}
IMAGES: dict[str, Ask] = {
    "an image": lambda way: [LONG, shown(way + "a"), WHAT],
    "the image again": lambda way: [LONG, shown(way + "a"), WHAT],
    "another image": lambda way: [LONG, shown(way + "b"), WHAT],
    "two images": lambda way: [shown(way + "a"), AND, shown(way + "c", (150, 300)), LONG, WHAT],
    "two images, swapped": lambda way: [
        shown(way + "c", (150, 300)), AND, shown(way + "a"), LONG, WHAT
    ],
    "an image twice": lambda way: [shown(way + "d"), AND, shown(way + "d"), LONG, WHAT],
    "an image twice again": lambda way: [shown(way + "d"), AND, shown(way + "d"), LONG, WHAT],
    "a wide image": lambda way: [shown(way + "w", (600, 60)), LONG, WHAT],
}  # fmt: skip
VIDEOS: dict[str, Ask] = {
    "a video": lambda way: [LONG, seen(way + "v"), WHAT],
    "the video again": lambda way: [LONG, seen(way + "v"), WHAT],
    "another video": lambda way: [LONG, seen(way + "x"), WHAT],
    "two videos, swapped": lambda way: [seen(way + "x"), AND, seen(way + "v"), LONG, WHAT],
}
SOUNDS: dict[str, Ask] = {
    "a sound": lambda way: [LONG, heard(way + "s"), WHAT],
    "the sound again": lambda way: [LONG, heard(way + "s"), WHAT],
    "two sounds": lambda way: [heard(way + "s"), AND, heard(way + "t", 2.5), LONG, WHAT],
    "two sounds, swapped": lambda way: [heard(way + "t", 2.5), AND, heard(way + "s"), LONG, WHAT],
    "a sound twice": lambda way: [heard(way + "u"), AND, heard(way + "u"), LONG, WHAT],
}
MIXED: dict[Medium, dict[str, Ask]] = {
    "video": {
        "an image and a video": lambda way: [seen(way + "v"), AND, shown(way + "a"), LONG, WHAT],
    },
    "embeddings": {
        "an image and embeddings": lambda way: [
            shown(way + "a"), AND, embedded(way + "e"), LONG, WHAT
        ],
    },
}  # fmt: skip
"""With an image beside the medium."""

EMBEDDINGS: dict[str, Ask] = {
    "embeddings": lambda way: [embedded(way + "e")],
    "the embeddings again": lambda way: [embedded(way + "e")],
    "other embeddings": lambda way: [embedded(way + "f")],
    "embeddings amid text": lambda way: [LONG, embedded(way + "e"), WHAT],
    "embeddings amid text again": lambda way: [LONG, embedded(way + "e"), WHAT],
    "embeddings twice": lambda way: [embedded(way + "e"), AND, embedded(way + "f", 9), WHAT],
}
BY_MEDIUM: dict[Medium, dict[str, Ask]] = {
    "text": TEXT, "image": IMAGES, "video": VIDEOS, "sound": SOUNDS, "embeddings": EMBEDDINGS,
}  # fmt: skip

REFUSED: dict[Medium, str] = {"image": "an image", "video": "a video", "sound": "a sound"}
"""What is asked of a model that may not take such a medium; these are of the medium "other"."""

OTHERS: dict[Medium, tuple[str, str]] = {
    "image": ("an image", "another image"),
    "video": ("a video", "another video"),
    "sound": ("two sounds", "two sounds, swapped"),
    "embeddings": ("embeddings", "other embeddings"),
}
"""Questions that differ by their media alone."""

ENOUGH: frozenset[str] = frozenset(
    {
        "an image", "the image again", "two images, swapped", "an image twice",
        "a video", "the video again", "a sound", "the sound again", "two sounds, swapped",
        "embeddings", "the embeddings again", "embeddings amid text",
    }
)  # fmt: skip
"""What is asked again where only the way of the media is another."""


class Question(NamedTuple):
    """One chat message, or embeddings alone, which only ``/v1/completions`` takes."""

    medium: Medium
    name: str
    content: list[Part]

    @property
    def alone(self) -> str:
        """Embeddings without a message around them, or nothing."""
        kinds = [part["type"] for part in self.content]
        return str(self.content[0]["data"]) if kinds == ["prompt_embeds"] else ""


def questions(way: str, media: frozenset[Medium], *, whole: bool) -> Iterator[Question]:
    """In the order of asking.

    Args:
        way: how the media travel.
        whole: whether everything is asked, or what may differ from way to way.
    """
    asked = [(medium, *each) for medium in BY_MEDIUM for each in BY_MEDIUM[medium].items()]
    if "image" in media:
        asked += [(medium, *each) for medium in MIXED for each in MIXED[medium].items()]
    for medium, name, ask in asked:
        if medium in media and (whole or name in ENOUGH):
            yield Question(medium, name, ask(way))
        elif whole and REFUSED.get(medium) == name:
            yield Question("other", name, ask(way))
