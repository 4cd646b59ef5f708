"""What is asked: loads, made from a seed.

Blocks of one number have one shape. Under each name they have their own words and pictures, so that
no block finds anything of another one in a cache.
"""

import base64
import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, TypeAlias

from PIL import Image

from tests.benchmarks.fleet_traffic import PICTURE, Ask, Content, Message, words
from tests.pictures import random_of

Session: TypeAlias = tuple[Ask, ...]
"""What one user asks, each once the one before is answered."""

QUESTION_WORDS: Final = 20
ANSWER_WORDS: Final = 30
SYSTEM_WORDS: Final = 60
TURNS: Final = 4
CHATS_PER_PICTURE: Final = 2
SHORT: Final = 16
LONG: Final = 256
"""Tokens of an answer."""


@dataclass(frozen=True)
class Closed:
    """So many clients, each of which asks as soon as it is answered."""

    clients: int


@dataclass(frozen=True)
class Open:
    """Sessions begin at random moments, whatever became of those before.

    Attributes:
        rate: requests per second, on average.
    """

    rate: float


Pace: TypeAlias = Closed | Open

Maker: TypeAlias = Callable[[random.Random, str, int], list[Session]]
"""From a shape, a name and a number of requests."""


@dataclass(frozen=True)
class Load:
    """A kind of traffic at a pace; its name is ``KIND@CLIENTS`` or ``KIND@RATE/s``."""

    name: str
    pace: Pace
    answer_tokens: int
    make: Maker

    def block(self, seed: int, number: int, name: str, requests: int) -> list[Session]:
        """The sessions of a block.

        Args:
            number: gives the shape, with the seed.
            name: gives words and pictures.
        """
        return self.make(random.Random(f"{seed} {self.name} {number}"), name, requests)


_NAME = re.compile(r"(?P<kind>pictures-(?P<times>[1-9]\d*)|chats|text|streams)@(?P<pace>.+)")


def load(name: str) -> Load:
    """A load by its name.

    Raises:
        ValueError: with a sentence about how names look.
    """
    match = _NAME.fullmatch(name)
    pace = _pace(match["pace"]) if match else None
    if match is None or pace is None:
        raise ValueError(
            f"{name!r} is no load: KIND@CLIENTS or KIND@RATE/s, where KIND is pictures-N (each "
            "picture asked about N times), chats, text or streams"
        )
    if match["times"]:
        return Load(name, pace, SHORT, partial(_pictures, int(match["times"])))
    if match["kind"] == "chats":
        return Load(name, pace, SHORT, _chats)
    return Load(name, pace, LONG if match["kind"] == "streams" else SHORT, _text)


def _pace(text: str) -> Pace | None:
    if re.fullmatch(r"[1-9]\d*", text):
        return Closed(int(text))
    if re.fullmatch(r"\d+(\.\d+)?/s", text) and (rate := float(text.removesuffix("/s"))) > 0:
        return Open(rate)
    return None


def _pictures(times: int, shape: random.Random, name: str, requests: int) -> list[Session]:
    """Questions about pictures, so many about each, in no order."""
    shown = [number // times for number in range(requests)]
    shape.shuffle(shown)
    return [
        (_ask(user, 0, [Message("user", (_picture(name, each), _question(name, user, 0)))]),)
        for user, each in enumerate(shown)
    ]


def _chats(shape: random.Random, name: str, requests: int) -> list[Session]:
    """Chats that grow, several about each picture.

    The answers in them are ours and not the engine's, so that prompts are known before.
    """
    count = max(1, requests // TURNS)
    shown = [number // CHATS_PER_PICTURE for number in range(count)]
    shape.shuffle(shown)
    return [tuple(_turns(name, user, each)) for user, each in enumerate(shown)]


def _turns(name: str, user: int, shown: int) -> Iterator[Ask]:
    messages = [Message("system", (words(f"{name} system", SYSTEM_WORDS),))]
    before: Content = (_picture(name, shown),)
    for turn in range(TURNS):
        messages.append(Message("user", (*before, _question(name, user, turn))))
        yield _ask(user, turn, messages)
        before = ()
        answer = words(f"{name} {user} answer {turn}", ANSWER_WORDS)
        messages.append(Message("assistant", (answer,)))


def _text(shape: random.Random, name: str, requests: int) -> list[Session]:
    """Questions behind one of two common instructions."""
    sessions: list[Session] = []
    for user in range(requests):
        system = words(f"{name} system {shape.randrange(2)}", SYSTEM_WORDS)
        messages = [Message("system", (system,)), Message("user", (_question(name, user, 0),))]
        sessions.append((_ask(user, 0, messages),))
    return sessions


def _ask(user: int, turn: int, messages: Sequence[Message]) -> Ask:
    return Ask(0.0, user, turn, tuple(messages))


def _picture(name: str, number: int) -> str:
    return f"{PICTURE}{name} {number}"


def _question(name: str, user: int, turn: int) -> str:
    return words(f"{name} {user} question {turn}", QUESTION_WORDS)


def pictures_of(sessions: Sequence[Session]) -> set[str]:
    """The names of all pictures in them."""
    return {
        content
        for session in sessions
        for ask in session
        for message in ask.messages
        for content in message.content
        if content.startswith(PICTURE)
    }


class Photos:
    """Square JPEGs by name.

    Args:
        side: in pixels.
    """

    def __init__(self, side: int) -> None:
        self._side = side
        self.uri = lru_cache(256)(self._uri)

    @property
    def tokens(self) -> int:
        """Of each of them, in the demo model: patches of 14 pixels, four of which are a token."""
        return (self._side // 28) ** 2

    def _uri(self, name: str) -> str:
        coarse = random_of(name).integers(0, 256, (16, 16, 3), dtype="uint8")
        image = Image.fromarray(coarse).resize((self._side, self._side), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=85)
        return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
