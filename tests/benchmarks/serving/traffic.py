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
BURST: Final = 16
"""Equal requests, one right after the other."""
BURST_WORDS: Final = 400
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

OPEN: Final = "/s"
"""How the names of open loops end."""


@dataclass(frozen=True)
class Share:
    """An open loop whose rate is known once a closed one of the same kind was raced.

    Attributes:
        saturation: of what the slowest contender had there; 1 is all of it.
    """

    saturation: float


Maker: TypeAlias = Callable[[random.Random, str, int], list[Session]]
"""From a shape, a name and a number of requests."""


@dataclass(frozen=True)
class Load:
    """A kind of traffic at a pace; its name is ``KIND@CLIENTS`` or ``KIND@RATE/s``."""

    kind: str
    pace: Pace
    answer_tokens: int
    make: Maker

    @property
    def name(self) -> str:
        """As it is asked for."""
        match self.pace:
            case Closed(clients):
                return f"{self.kind}@{clients}"
            case Open(rate):
                return f"{self.kind}@{rate:g}{OPEN}"

    def block(self, seed: int, number: int, name: str, requests: int) -> list[Session]:
        """The sessions of a block.

        Args:
            number: gives the shape, with the seed.
            name: gives words and pictures.
        """
        return self.make(random.Random(f"{seed} {self.name} {number}"), name, requests)


@dataclass(frozen=True)
class Later:
    """A load whose rate is not known yet: ``KIND@PERCENT%``."""

    kind: str
    share: Share

    def at(self, saturation: float) -> Load:
        """What it is then.

        Args:
            saturation: requests per second of the slowest contender, as fast as it can.
        """
        rate = round(self.share.saturation * saturation, 2)
        return Load(self.kind, Open(rate), *_kind(self.kind))


_SHOWS: Final = (
    "KIND@CLIENTS, KIND@RATE/s or KIND@PERCENT%, where KIND is pictures-N (each picture asked "
    "about N times), chats, documents, groups, bursts, text or streams"
)


def load(name: str) -> Load:
    """A load by its name.

    Raises:
        ValueError: with a sentence about how names look.
    """
    (one,) = plan([name])
    if isinstance(one, Later):
        raise ValueError(f"{name}: nothing says what that is a share of")
    return one


def plan(names: Sequence[str]) -> list[Load | Later]:
    """Loads by their names, in the order in which they are raced.

    Raises:
        ValueError: with a sentence about how names look, or about the closed loop that a share
            needs before it.
    """
    planned: list[Load | Later] = []
    for name in names:
        kind, _, text = name.partition("@")
        pace = _pace(text)
        if pace is None or not (kind in _KINDS or _TIMES.fullmatch(kind)):
            raise ValueError(f"{name!r} is no load: {_SHOWS}")
        if not isinstance(pace, Share):
            planned.append(Load(kind, pace, *_kind(kind)))
        elif any(_saturates(each, kind) for each in planned):
            planned.append(Later(kind, pace))
        else:
            raise ValueError(f"{name}: nothing says what that is a share of: race {kind}@CLIENTS")
    return planned


def _saturates(one: Load | Later, kind: str) -> bool:
    return isinstance(one, Load) and isinstance(one.pace, Closed) and one.kind == kind


def _pace(text: str) -> Pace | Share | None:
    if re.fullmatch(r"[1-9]\d*", text):
        return Closed(int(text))
    if re.fullmatch(r"\d+(\.\d+)?/s", text) and (rate := float(text.removesuffix(OPEN))) > 0:
        return Open(rate)
    if re.fullmatch(r"[1-9]\d*%", text):
        return Share(int(text.removesuffix("%")) / 100)
    return None


_TIMES = re.compile(r"pictures-([1-9]\d*)")


def _kind(name: str) -> tuple[int, Maker]:
    """The tokens of its answers, and what makes it."""
    if match := _TIMES.fullmatch(name):
        return SHORT, partial(_pictures, int(match[1]))
    return _KINDS[name]


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


def _bursts(_: random.Random, name: str, requests: int) -> list[Session]:
    """Long new prompts, each asked by many at once."""
    texts = (words(f"{name} burst {user // BURST}", BURST_WORDS) for user in range(requests))
    return [(_ask(user, 0, [Message("user", (text,))]),) for user, text in enumerate(texts)]


_KINDS: Final[Mapping[str, tuple[int, Maker]]] = {
    "chats": (SHORT, _chats),
    "documents": (SHORT, _documents),
    "groups": (SHORT, _groups),
    "bursts": (SHORT, _bursts),
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
