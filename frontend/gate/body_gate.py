"""Between admission and vLLM's app: parse each body once, JSON or form, judge it, pass it on."""

import asyncio
import json
import time
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.datastructures import FormData, Headers
from starlette.requests import Request

from common.errors import RequestRejectedError
from common.observability.telemetry import REQUESTS
from frontend.asgi import App, Arrival, Scope, error_answer
from frontend.client_turns import ClientTurns
from frontend.gate.forms import read_form, texts_of
from frontend.gate.judge import judge
from frontend.gate.refused_fields import RefusedFieldError, check

MAX_BRACKETS: Final = 1 << 18
"""Lists and objects of one body, and brackets in its texts. 64 MB of ``{}`` are 20 million objects,
and seconds of the event loop. JSON within a text has one per 40 characters."""

MAX_COMMAS: Final = 1 << 21
"""Entries of lists and objects: token ids above all."""

DECODER: Final = msgspec.json.Decoder(float_hook=float)
"""msgspec's own float parser takes 9 µs for each near the ends of their range, such as ``1e308``: a
second and a half of the event loop for 1 MB. Python's takes 0.3 µs for any."""


def read(body: bytes) -> Any:
    """Parse JSON into Python's types, at a cost that grows with its bytes alone.

    Raises:
        RequestRejectedError: it has too many values, is nested too deeply for a parser, or has text
            that no answer can repeat.
        json.JSONDecodeError: it isn't JSON; Python's error, as users know it.
    """
    if body.count(b"{") + body.count(b"[") > MAX_BRACKETS:
        raise RequestRejectedError(f"the body has more than {MAX_BRACKETS} lists and objects")
    if body.count(b",") > MAX_COMMAS:
        raise RequestRejectedError(f"the body has more than {MAX_COMMAS} values")
    try:
        try:
            return DECODER.decode(body)
        except msgspec.DecodeError:
            parsed = json.loads(body)  # takes NaN and large numbers
            json.dumps(parsed, ensure_ascii=False).encode()
            return parsed
    except UnicodeEncodeError:
        raise RequestRejectedError(
            "the body has half of a surrogate pair, such as a text cut within an emoji"
        ) from None
    except UnicodeDecodeError:
        raise RequestRejectedError("the body is not encoded in UTF-8, UTF-16 or UTF-32") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise RequestRejectedError(f"the body can't be read: {error}") from None
    except RecursionError:
        raise RequestRejectedError("the body is nested too deeply") from None


TURN_BYTES: Final = 8 << 10
"""Bytes of a body from which it waits for a turn of the event loop. 200 chats of 55 KB, judged and
validated in one turn, kept others waiting for 4 s."""

SLOW_S: Final = 0.02
"""CPU seconds of a turn with a body from which the next body waits as long: an answer needs some 25
turns. Eight connections with 262,144 tokens each, 0.1 s of a turn, kept chats waiting for 2.5 s. At
full load turns with pictures take 0.001 to 0.016 s."""

_PARSED: Final = "mmrouter.body"
"""Key in a request's scope of its parsed body, or of the error in it. Apps get nothing else: what
another parser reads but :func:`read` refuses would not be judged."""

_FORM: Final = "mmrouter.form"
"""Key of the form in a request's scope."""

_FORMS: Final = ("multipart/", "application/x-www-form-urlencoded")


class BodyGate:
    """Answer 400 to bodies beyond the limits of ``fields.py``, or with refused fields."""

    def __init__(self, max_choices: int, *, runs_tools: bool = False) -> None:
        """``runs_tools`` tells whether the server runs tools itself (``--tool-server``)."""
        self._max_choices = max_choices
        self._runs_tools = runs_tools
        self._clients = ClientTurns(1)
        self._turns = asyncio.Lock()
        self._free_at = 0.0

    async def __call__(self, arrival: Arrival) -> App | None:
        """Return a 400 for a body that must not reach vLLM."""
        if arrival.body is None:
            return None
        if len(arrival.body) >= TURN_BYTES:
            async with self._clients.of_client(), self._turns:
                await self._turn()
        take = self._take_form if _is_form(arrival.headers) else self._take_json
        try:
            take(arrival, arrival.body)
        except RequestRejectedError as error:
            REQUESTS.labels(type(error).__name__).inc()
            return _answer(error)
        return None

    async def _turn(self) -> None:
        """Wait for a turn of the event loop, in which vLLM's app validates the body too."""
        await asyncio.sleep(0)
        if (left := self._free_at - time.monotonic()) > SLOW_S:
            await asyncio.sleep(left)
        asyncio.get_running_loop().call_soon(self._ended, time.thread_time())

    def _ended(self, began: float) -> None:
        self._free_at = time.monotonic() + time.thread_time() - began

    def _take_json(self, arrival: Arrival, content: bytes) -> None:
        try:
            body = read(content)
        except json.JSONDecodeError as error:
            _put(arrival, _PARSED, error)  # vLLM's app has the answer that clients know
            return
        judge(body, self._max_choices)
        check(arrival.path, body, runs_tools=self._runs_tools)
        _put(arrival, _PARSED, body)
        arrival.context.note_salt(body)

    def _take_form(self, arrival: Arrival, content: bytes) -> None:
        form = read_form(content, arrival.headers["content-type"])
        judge(texts_of(form), self._max_choices)
        _put(arrival, _FORM, form)
        arrival.body = b""  # nothing else reads it, and files are copies


def _put(arrival: Arrival, key: str, body: object) -> None:
    """Keep a body for the app, until the request ends: its connection may stay."""
    arrival.scope[key] = body
    arrival.held.callback(arrival.scope.pop, key, None)


def take_parsed_bodies() -> None:
    """Have all apps of this process take the bodies that a gate has parsed."""
    # Patch the class, since FastAPI creates the requests.
    Request.json, Request.form = _json, _form  # type: ignore[assignment, method-assign]


def body_of(scope: Scope) -> object:
    """Return the JSON or the form of a request that passed a gate; None if it can't be read."""
    return scope.get(_FORM, scope.get(_PARSED))


async def _json(self: Request) -> Any:
    if _PARSED not in self.scope:  # no body, or a form
        raise json.JSONDecodeError("Expecting value", "", 0)
    parsed = self.scope[_PARSED]
    if isinstance(parsed, json.JSONDecodeError):
        raise parsed
    return parsed


async def _form(self: Request, **_: float) -> FormData:
    return self.scope.get(_FORM, FormData())


def _answer(error: RequestRejectedError) -> App:
    field = error.field if isinstance(error, RefusedFieldError) else None
    return error_answer(str(error), HTTPStatus.BAD_REQUEST, kind="BadRequestError", param=field)


def _is_form(headers: Headers) -> bool:
    return headers.get("content-type", "").lower().startswith(_FORMS)
