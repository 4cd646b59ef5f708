"""Write the large parts of whole answers piece by piece, while an answer is sent.

vLLM makes models of all log probabilities, lists of all pooled numbers, and the JSON, each in
one call, during which no other thread of Python runs. The log probabilities of 8,000 tokens with 20
candidates stopped all other requests for three seconds, and ten million numbers for fifteen. Here
vLLM makes an answer with a stand-in for each large part. The part takes its place as it goes to the
client: made in a thread, by vLLM's own methods, some tokens at a time.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeAlias

from frontend.asgi import Arrival, Message
from frontend.request_context import current_context

Pieces: TypeAlias = Iterator[bytes]
"""Of JSON. Joined they are one value, or the entries of a list without its brackets."""

MANY: Final = 512
"""Log probabilities from which those of a whole answer are deferred."""

SLICE: Final = 64
"""Tokens whose log probabilities are made at once."""

_END: Final = object()


class DeferredParts:
    """The parts of an answer that are not made yet, in its order.

    Attributes:
        whole: whether what vLLM makes next is a whole answer, of which parts may be deferred.
        held: closed when the request has ended.
    """

    def __init__(self) -> None:
        self.whole = False
        self.held = ExitStack()
        self._parts: list[tuple[bytes, Pieces]] = []

    def add(self, stand_in: object, pieces: Pieces) -> None:
        """Have a part take the place of a JSON value that stands nowhere else in the answer."""
        self._parts.append((written(stand_in), pieces))

    def spliced(self, answer: bytes) -> Pieces:
        """Yield an answer with each part in its place."""
        parts, self._parts = self._parts, []
        for place, pieces in parts:
            before, found, rest = answer.partition(place)
            if found:  # or vLLM answers with an error instead
                yield before
                yield from pieces
                answer = rest
        yield answer

    def __bool__(self) -> bool:
        return bool(self._parts)


def begin_whole_answer() -> None:
    """Let what follows defer parts of the answer to the request that this task works on."""
    if (parts := current_context().find(DeferredParts)) is not None:
        parts.whole = True


def deferring(logprobs: Sequence[Any]) -> DeferredParts | None:
    """Return where to defer the log probabilities of some tokens; None if they are few, or go into
    the events of a stream."""
    parts = current_context().find(DeferredParts)
    if parts is None or not parts.whole or not logprobs:
        return None
    return parts if len(logprobs) * len(logprobs[-1] or ()) > MANY else None


def written(value: object) -> bytes:
    """Return JSON as the answers of vLLM's server have it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def entries(count: int, make: Callable[[slice], list[Any]], step: int = SLICE) -> Pieces:
    """Yield the entries of a list, some at a time.

    Args:
        make: gives those of a slice, as JSON has them.
    """
    for start in range(0, count, step):
        made = written(make(slice(start, start + step)))[1:-1]
        yield b"," + made if start else made


def columns(count: int, make: Callable[[slice], dict[str, list[Any]]]) -> Pieces:
    """Yield an object of lists of equal length, which are made together."""
    lists: dict[str, list[bytes]] = {}
    for start in range(0, count, SLICE):
        for name, values in make(slice(start, start + SLICE)).items():
            lists.setdefault(name, []).append(written(values)[1:-1])
    before = b"{"
    for name, pieces in lists.items():
        yield before + written(name) + b":[" + pieces[0]
        yield from (b"," + piece for piece in pieces[1:])
        before = b"],"
    yield b"]}"


async def in_thread(pieces: Pieces) -> AsyncIterator[bytes]:
    """Yield pieces that are made in a thread, each when the one before is taken."""
    while (piece := await asyncio.to_thread(next, pieces, _END)) is not _END:
        if isinstance(piece, bytes) and piece:
            yield piece


async def send_deferred_parts(arrival: Arrival) -> None:
    """Put the deferred parts of an answer into their places when its body is sent."""
    send, parts = arrival.send, DeferredParts()
    arrival.context.put(parts)
    arrival.held.enter_context(parts.held)

    async def splice(message: Message) -> None:
        if not parts:
            await send(message)
        elif message["type"] == "http.response.start":
            await send(_without_length(message))
        else:
            async for piece in in_thread(parts.spliced(message["body"])):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({**message, "body": b""})

    arrival.send = splice


def _without_length(head: Message) -> Message:
    headers = [each for each in head["headers"] if each[0].lower() != b"content-length"]
    return {**head, "headers": headers}
