"""The clients of ``bench_fleet``: a request each, at its moment, and what came of it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import aiohttp
import msgspec

from tests.benchmarks.fleet_traffic import Ask

SILENCE_S = 120.0
"""Without a byte for so long, a request hangs."""


@dataclass(frozen=True)
class Whole:
    """An answer with its end.

    Attributes:
        arrived_s: when each event with a token came, after sending the request.
    """

    text: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    arrived_s: Sequence[float]

    @property
    def first_token_s(self) -> float:
        """From sending the request to its first token."""
        return self.arrived_s[0]


@dataclass(frozen=True)
class Cut:
    """The connection broke.

    Attributes:
        begun: whether the answer had begun.
    """

    begun: bool
    why: str


@dataclass(frozen=True)
class Odd:
    """Neither: refused with a status, an error in the stream, a stream that closes in order but
    has no end, or nothing that comes.
    """

    why: str


Outcome: TypeAlias = Whole | Cut | Odd


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    """What is read of an event; one with an error has no choices."""

    choices: list[_Choice]
    usage: _Usage | None = None

    @property
    def has_token(self) -> bool:
        """Whether it tells more than whose turn it is; a token may be a part of a character."""
        return any(each.delta.content or not each.delta.role for each in self.choices)


_EVENTS = msgspec.json.Decoder(_Event)


def connections() -> aiohttp.ClientSession:
    """One connection a request: those that a server keeps alive and then closes would look like
    its death.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)


async def ask(http: aiohttp.ClientSession, url: str, body: bytes) -> Outcome:
    """Send a request and read its stream."""
    began = time.perf_counter()
    begun = False
    headers = {"Content-Type": "application/json"}
    try:
        async with http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as reply:
            begun = True
            if reply.status != 200:
                return Odd(f"{reply.status} {(await reply.text())[:200]}")
            return await _stream(reply, began)
    except aiohttp.ServerTimeoutError:
        return Odd(f"nothing came for {SILENCE_S:.0f} s")
    except (aiohttp.ClientError, ConnectionError) as error:
        return Cut(begun, repr(error))


async def _stream(reply: aiohttp.ClientResponse, began: float) -> Outcome:
    text, ended = "", False
    arrived: list[float] = []
    usage: _Usage | None = None
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            if not ended or usage is None or not arrived:
                return Odd("it was done but had no end")
            details = usage.prompt_tokens_details
            cached = (details.cached_tokens if details else None) or 0
            return Whole(text, usage.completion_tokens, usage.prompt_tokens, cached, arrived)
        try:
            event = _EVENTS.decode(line.removeprefix(b"data: "))
        except msgspec.ValidationError:
            return Odd(line.decode(errors="replace")[:200])
        if event.has_token:
            arrived.append(time.perf_counter() - began)
        usage = event.usage or usage
        for choice in event.choices:
            text += choice.delta.content or ""
            ended = ended or choice.finish_reason is not None
    return Odd("the stream closed in order but had no end")


Url = Callable[[Ask], str]
"""Where a request goes."""


async def send(
    http: aiohttp.ClientSession, asks: Sequence[Ask], bodies: Sequence[bytes], url: Url
) -> list[Outcome]:
    """Send each request at its moment, whatever became of the others; what came of them."""
    clock = asyncio.get_running_loop().time
    start = clock()

    async def one(each: Ask, body: bytes) -> Outcome:
        await asyncio.sleep(start + each.at - clock())
        return await ask(http, url(each), body)

    return await asyncio.gather(*map(one, asks, bodies))


def in_turn(urls: Sequence[str]) -> Url:
    """The turns of a conversation go to one frontend after the other, those of several users at
    once to different ones.
    """
    return lambda each: urls[(each.user + each.turn) % len(urls)]
