"""Build the large parts of whole answers piece by piece, while an answer is sent.

vLLM builds all log probabilities, pooled numbers and the JSON in one call each, which blocks all
other threads of Python: 3 s for 8,000 tokens with 20 candidates, 15 s for ten million numbers. Here
its answer has stand-ins for large parts. A thread builds a part by vLLM's own methods, some tokens
at a time, as it is sent.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeAlias

from vllm.logprobs import FlatLogprobs, Logprob

from frontend.asgi import Arrival, Message
from frontend.request_context import current_context

Pieces: TypeAlias = Iterator[bytes]
"""JSON: joined, the pieces are one value, or the entries of a list without its brackets."""

MANY: Final = 512
"""Log probabilities of a whole answer from which further ones are deferred."""

SLICE: Final = 64
"""Tokens whose log probabilities are built at once."""

_END: Final = object()

_MAKER: Final = ThreadPoolExecutor(1, thread_name_prefix="answers")
"""Builds the pieces of all requests, in turn. More threads would be no faster, and each takes the
GIL from the event loop."""


class DeferredParts:
    """The parts of an answer that are not built yet.

    Attributes:
        whole: whether vLLM builds a whole answer next, of which parts may be deferred.
        logprobs: number of log probabilities so far.
        held: closed when the request has ended.
    """

    def __init__(self) -> None:
        self.whole = False
        self.logprobs = 0
        self.held = ExitStack()
        self._parts: list[tuple[bytes, Pieces]] = []

    def add(self, stand_in: object, pieces: Pieces) -> None:
        """Have a part replace a JSON value that occurs once in the answer."""
        self._parts.append((written(stand_in), pieces))

    def spliced(self, answer: bytes) -> Pieces:
        """Yield an answer with each part in its place, in whichever order they were added."""
        parts, self._parts = self._parts, []
        places = ((answer.find(place), place, pieces) for place, pieces in parts)
        end = 0
        for start, place, pieces in sorted(places, key=itemgetter(0)):
            if start >= 0:  # or vLLM answers with an error instead
                yield answer[end:start]
                yield from pieces
                end = start + len(place)
        yield answer[end:]

    def __bool__(self) -> bool:
        return bool(self._parts)


def begin_whole_answer() -> None:
    """Allow parts of the answer to this task's request to be deferred."""
    if (parts := current_context().find(DeferredParts)) is not None:
        parts.whole = True


def deferring(logprobs: Sequence[Any]) -> DeferredParts | None:
    """Return where to defer log probabilities; None for few, or in the events of a stream."""
    parts = current_context().find(DeferredParts)
    if parts is None or not parts.whole or not logprobs:
        return None
    if isinstance(logprobs, FlatLogprobs):
        parts.logprobs += len(logprobs.logprobs)
    else:
        parts.logprobs += sum(map(len, filter(None, logprobs)))
    return parts if parts.logprobs > MANY else None


def defer_prompt_logprobs(*answers: Any) -> None:
    """Defer the log probabilities of whole prompts in vLLM's answers."""
    for answer in answers:
        logprobs = getattr(answer, "prompt_logprobs", None)
        if logprobs and (parts := deferring(logprobs)) is not None:
            stand_in = {0: Logprob(0.0, decoded_token=secrets.token_hex(16))}
            answer.prompt_logprobs = [stand_in]
            parts.add(_as_json(stand_in), entries(len(logprobs), partial(_some_of, logprobs)))


def _some_of(logprobs: Sequence[Mapping[int, Logprob] | None], part: slice) -> list[object]:
    return [None if each is None else _as_json(each) for each in logprobs[part]]


def _as_json(position: Mapping[int, Logprob]) -> dict[int, object]:
    return {token: vars(each) for token, each in position.items()}


def written(value: object) -> bytes:
    """Return JSON as vLLM's server writes it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def entries(count: int, make: Callable[[slice], Sequence[object]], step: int = SLICE) -> Pieces:
    """Yield the entries of a list, some at a time; ``make`` returns those of a slice."""
    for start in range(0, count, step):
        made = written(make(slice(start, start + step)))[1:-1]
        yield b"," + made if start else made


def joined(values: Sequence[bytes]) -> Pieces:
    """Yield entries of a list that are JSON already, some at a time."""
    for start in range(0, len(values), SLICE):
        yield (b"," if start else b"") + b",".join(values[start : start + SLICE])


def columns(count: int, make: Callable[[slice], Mapping[str, Sequence[object]]]) -> Pieces:
    """Yield an object of equally long lists, which are built together."""
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
    """Yield pieces that a thread builds, each once the one before is taken."""
    loop = asyncio.get_running_loop()
    while (piece := await loop.run_in_executor(_MAKER, next, pieces, _END)) is not _END:
        if isinstance(piece, bytes) and piece:
            yield piece


async def send_deferred_parts(arrival: Arrival) -> None:
    """Put the deferred parts of an answer into their places while its body is sent."""
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
