"""What is asked: loads, made from a seed.

Blocks of one number have one shape. Under each name they have their own words and pictures, so that
no block finds anything of another one in a cache.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from tests.benchmarks.fleet_traffic import PICTURE, Ask, Content, Message, words
from tests.benchmarks.serving.photos import picture

Session: TypeAlias = tuple[Ask, ...]
"""What one user asks, each once the one before is answered."""

QUESTION_WORDS: Final = 20
ANSWER_WORDS: Final = 30
SYSTEM_WORDS: Final = 60
TURNS: Final = 4
CHATS_PER_PICTURE: Final = 2
PAGES: Final = 4
"""Of a document, at most; as many as engines here take in a prompt."""
PAGE_SIZE: Final = (644, 896)
READERS: Final = 4
"""Of a document; each asks once."""
GROUP: Final = 5
GROUP_PICTURES: Final = 3
GROUP_SIZE: Final = (1280, 720)
"""A group's pictures: 720p. llm-d's benchmark has 600 groups of five with three of them."""
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


_NAME = re.compile(r"(?P<kind>pictures-(?P<times>[1-9]\d*)|[a-z]+)@(?P<pace>.+)")


def load(name: str) -> Load:
    """A load by its name.

    Raises:
        ValueError: with a sentence about how names look.
    """
    match = _NAME.fullmatch(name)
    pace = _pace(match["pace"]) if match else None
    if match and pace and match["times"]:
        return Load(name, pace, SHORT, partial(_pictures, int(match["times"])))
    if match and pace and match["kind"] in _KINDS:
        return Load(name, pace, *_KINDS[match["kind"]])
    raise ValueError(
        f"{name!r} is no load: KIND@CLIENTS or KIND@RATE/s, where KIND is pictures-N (each "
        f"picture asked about N times), {', '.join(_KINDS)}"
    )


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
    return [_one(user, name, (picture(f"{name} {each}"),)) for user, each in enumerate(shown)]


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
    before: Content = (picture(f"{name} {shown}"),)
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


def _documents(shape: random.Random, name: str, requests: int) -> list[Session]:
    """Questions about documents of several pages, several about each."""
    count = -(-requests // READERS)
    pages = [shape.randint(2, PAGES) for _ in range(count)]
    shown = [number // READERS for number in range(requests)]
    shape.shuffle(shown)
    return [_one(user, name, _pages(name, each, pages[each])) for user, each in enumerate(shown)]


def _pages(name: str, document: int, count: int) -> Content:
    return tuple(picture(f"{name} {document} page {page}", *PAGE_SIZE) for page in range(count))


def _groups(shape: random.Random, name: str, requests: int) -> list[Session]:
    """Questions about the pictures of a group, in no order."""
    shown = [number // GROUP for number in range(requests)]
    shape.shuffle(shown)
    return [_one(user, name, _group(name, each)) for user, each in enumerate(shown)]


def _group(name: str, group: int) -> Content:
    return tuple(
        picture(f"{name} {group} {number}", *GROUP_SIZE) for number in range(GROUP_PICTURES)
    )


_KINDS: Final[Mapping[str, tuple[int, Maker]]] = {
    "chats": (SHORT, _chats),
    "documents": (SHORT, _documents),
    "groups": (SHORT, _groups),
    "text": (SHORT, _text),
    "streams": (LONG, _text),
}


def _one(user: int, name: str, shown: Content) -> Session:
    """A question about pictures, all there is."""
    return (_ask(user, 0, [Message("user", (*shown, _question(name, user, 0)))]),)


def _ask(user: int, turn: int, messages: Sequence[Message]) -> Ask:
    return Ask(0.0, user, turn, tuple(messages))


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
