"""The traffic of ``bench_fleet``: what is asked when, and what a cache could hold of it at best.

A block of traffic has three kinds of requests, all from one seed:

- chats that grow, most of them about one of a few pictures that several chats share;
- questions about documents that several users ask about;
- rushes: a few users ask about a new picture or document at almost the same time. That is what
  several frontends can know least about, since nothing of it has been told yet.

Blocks of the same seed have the same shape, moment for moment, but under each name their own words
and pictures, so that no block finds anything of another one in a cache.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tests.pictures import data_uri, picture

BLOCK_SIZE = 32
"""Tokens of a KV block, as tests/e2e/processes.py has it for engines."""

PICTURE_SIDE = 336
PICTURE_TOKENS = (PICTURE_SIDE // 28) ** 2
"""Of the demo model: patches of 14 pixels, four of which become a token."""

SYSTEM_WORDS = 60
DOCUMENT_WORDS = 300
QUESTION_WORDS = 25
ANSWER_WORDS = 30
SYSTEMS = 3
PICTURES = 8
DOCUMENTS = 6
TURNS = 4
THINK_S = 4.0
RUSH_SIZE = 3
RUSH_S = 0.15

DOCUMENT_SHARE = 0.2
RUSH_SHARE = 0.2
"""Of all requests; the rest are turns of chats."""

Content: TypeAlias = tuple[str, ...]
"""What a message shows in order: words, or the name of a picture behind ``PICTURE``."""

PICTURE = "picture:"


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: Content


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        at: seconds after the block's beginning.
        user: number of the conversation.
        turn: of the conversation, from 0.
    """

    at: float
    user: int
    turn: int
    messages: tuple[Message, ...]

    def body(self, max_tokens: int, uri: Callable[[str], str] | None = None) -> bytes:
        """As OpenAI's API takes it: a stream with usage at its end.

        Args:
            uri: of a picture's name; small PNGs unless given.
        """
        uri = uri or _uri
        return json.dumps(
            {
                "model": "demo",
                "messages": [
                    {"role": role, "content": [_part(each, uri) for each in content]}
                    for role, content in self.messages
                ],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


def _part(content: str, uri: Callable[[str], str]) -> dict[str, object]:
    if content.startswith(PICTURE):
        return {"type": "image_url", "image_url": {"url": uri(content)}}
    return {"type": "text", "text": content}


@cache
def _uri(name: str) -> str:
    return data_uri(picture(name, (PICTURE_SIDE, PICTURE_SIDE)))


class Traffic:
    """Makes the blocks of a seed.

    Args:
        rate: requests per second, on average.
        seconds: of arrivals; turns of chats may come a little later.
    """

    def __init__(self, seed: int, rate: float, seconds: float) -> None:
        self._seed = seed
        self._rate = rate
        self._seconds = seconds

    def block(self, name: str, number: int) -> list[Ask]:
        """The requests of a block, in the order in which they come.

        Args:
            name: gives the words and pictures.
            number: gives the shape, with the seed.
        """
        shape = random.Random(f"{self._seed} {number}")
        users = itertools.count()
        total = round(self._rate * self._seconds)
        asks: list[Ask] = []
        while len(asks) < total * RUSH_SHARE:
            asks += _rush(name, shape, users, shape.uniform(0, self._seconds))
        for _ in range(round(total * DOCUMENT_SHARE)):
            asks.append(_document(name, shape, next(users), shape.uniform(0, self._seconds)))
        while len(asks) < total:
            asks += _chat(name, shape, next(users), shape.uniform(0, self._seconds))
        return sorted(asks, key=lambda ask: ask.at)


def _chat(name: str, shape: random.Random, user: int, at: float) -> Iterator[Ask]:
    """Turns about a picture, or about nothing: each prompt is the one before, its answer and more.

    The answers in it are ours and not the engine's, so that a block's prompts are known before it.
    """
    system = f"{name} system {_often_small(shape, SYSTEMS)}"
    messages = [Message("system", (words(system, SYSTEM_WORDS),))]
    shown: Content = ()
    if shape.random() < 0.7:
        shown = (f"{PICTURE}{name} {_often_small(shape, PICTURES)}",)
    for turn in range(shape.randint(1, TURNS)):
        question = words(f"{name} {user} question {turn}", QUESTION_WORDS)
        messages.append(Message("user", (*shown, question)))
        yield Ask(at, user, turn, tuple(messages))
        shown = ()
        messages.append(
            Message("assistant", (words(f"{name} {user} answer {turn}", ANSWER_WORDS),))
        )
        at += THINK_S * shape.uniform(0.7, 1.3)


def _document(name: str, shape: random.Random, user: int, at: float) -> Ask:
    document = f"{name} document {_often_small(shape, DOCUMENTS)}"
    question = words(f"{name} {user} about it", QUESTION_WORDS)
    return Ask(at, user, 0, (Message("user", (words(document, DOCUMENT_WORDS), question)),))


def _rush(name: str, shape: random.Random, users: Iterator[int], at: float) -> Iterator[Ask]:
    """Several users at once about what nobody has asked about before."""
    first = next(users)
    new = f"{name} news {first}"
    shown = f"{PICTURE}{new}" if shape.random() < 0.5 else words(new, DOCUMENT_WORDS)
    for user in (first, *itertools.islice(users, RUSH_SIZE - 1)):
        question = words(f"{name} {user} news", QUESTION_WORDS)
        yield Ask(at, user, 0, (Message("user", (shown, question)),))
        at += shape.uniform(0, RUSH_S)


def _often_small(shape: random.Random, choices: int) -> int:
    """A number below ``choices``, small ones more often."""
    return int(choices * shape.random() ** 2)


@cache
def words(name: str, count: int) -> str:
    """So many words that no other name gives."""
    draw = random.Random(name)
    return " ".join(_word(draw) for _ in range(count)) + ". "


def _word(draw: random.Random) -> str:
    return "".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(2))


class BestCache:
    """How many tokens of each prompt a cache without limits could hold, of those before it.

    Args:
        model: the model's folder, for its tokenizer and chat template.
        picture_tokens: of a picture, by its name.
    """

    def __init__(
        self, model: Path, picture_tokens: Callable[[str], int] = lambda _: PICTURE_TOKENS
    ) -> None:
        from transformers import AutoTokenizer  # takes seconds to import

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._pad: int = self._tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._picture_tokens = picture_tokens

    def tokens(self, ask: Ask) -> list[int | str]:
        """A prompt's tokens; those of a picture are named after it."""
        shown = [
            content
            for message in ask.messages
            for content in message.content
            if content.startswith(PICTURE)
        ]
        messages = [
            {
                "role": role,
                "content": [
                    {"type": "image"}
                    if part.startswith(PICTURE)
                    else {"type": "text", "text": part}
                    for part in content
                ],
            }
            for role, content in ask.messages
        ]
        ids: list[int] = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        names = iter(shown)
        tokens: list[int | str] = []
        for token in ids:
            if token == self._pad:
                name = next(names)
                tokens += [name] * self._picture_tokens(name)
            else:
                tokens.append(token)
        return tokens

    def best(self, asks: Sequence[Ask]) -> list[tuple[int, int]]:
        """Of each request of a block, its prompt's tokens and how many could be cached."""
        held: set[int] = set()
        found = []
        for ask in asks:
            tokens = self.tokens(ask)
            blocks = list(_chained(tokens))
            # The engine computes the last token always.
            usable = blocks[: (len(tokens) - 1) // BLOCK_SIZE]
            hit = sum(1 for _ in itertools.takewhile(held.__contains__, usable))
            held.update(blocks)
            found.append((len(tokens), hit * BLOCK_SIZE))
        return found


def _chained(tokens: Sequence[int | str]) -> Iterator[int]:
    """A name for each full block and all before it."""
    parent = 0
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = hash((parent, *tokens[start : start + BLOCK_SIZE]))
        yield parent
