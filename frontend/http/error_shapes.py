"""Shape of all errors: OpenAI's, or Anthropic's on its paths.

vLLM translates only the errors of its own Anthropic route, not those of its schemas and layers, and
names no code for a prompt that is too long. Every 429 and 503 gets a ``Retry-After``.
"""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from types import SimpleNamespace
from typing import Final

from starlette.datastructures import MutableHeaders
from vllm.entrypoints.serve.exception_handling import utils

from frontend.asgi import RETRY_AFTER_S, Arrival, Message, Send

MESSAGES: Final = "/v1/messages"

MAX_ERROR_BYTES: Final = 1 << 20
"""Larger answers are no errors of ours or vLLM's, and pass unchanged."""

_ANTHROPICS: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    529: "overloaded_error",
}
_TOO_LONG: Final = re.compile(r"maximum context length|longer than the maximum model length")

_RETRYABLE = (429, 503)

_regex: Final = vars(utils)["re"]

_LINEAR: Final = {
    r"""\n?\s*File "[^"]+", line \d+, in \S+(\n\s+.*)?""": _regex.compile(
        r"""\s*+(?:File "[^"]+", line \d+, in \S+(\n\s+.*)?|(*SKIP)(*FAIL))"""
    ),
    r"(?:/[\w\-]+)+/[\w\-]+\.\w+": _regex.compile(r"(?:/[\w\-]++){2,}+(?:\.\w+|(*SKIP)(*FAIL))"),
}
"""Patterns that vLLM searches its errors for on the event loop, which quote clients, and equal ones
whose cost is linear. A model's name of 8 KB of ``/a`` took 11 s: the cube of its length."""

_MAX_CHARACTERS: Final = 1 << 18
"""Of an error. A part's unknown type of 60 MB, which vLLM quotes, took these patterns 9 s."""


def _sub(pattern: str, instead: str, text: str) -> str:
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}…"
    return str(_regex.sub(_LINEAR.get(pattern, pattern), instead, text))


vars(utils)["re"] = SimpleNamespace(sub=_sub)


async def shape_errors(arrival: Arrival) -> None:
    """Hold an error back until it is complete, and rewrite it if necessary."""
    path = arrival.path
    anthropic = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    arrival.send = _Held(arrival.send, anthropic=anthropic)


class _Held:
    def __init__(self, send: Send, *, anthropic: bool) -> None:
        self._send = send
        self._rewrite = as_anthropics if anthropic else _as_openais
        self._head: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._head = message
            return
        if self._head is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        more = message.get("more_body", False)
        if more and len(self._body) <= MAX_ERROR_BYTES:
            return
        head, self._head = self._head, None
        if head["status"] == HTTPStatus.INTERNAL_SERVER_ERROR:
            # The app may raise after its answer, and the connection is closed then: its client, or
            # a proxy for others, must not send another request on it.
            head = {**head, "headers": [*head.get("headers", ()), (b"connection", b"close")]}
        answer = None if more else self._rewrite(head["status"], self._body)
        if answer is not None:
            self._body = json.dumps(answer, separators=(",", ":")).encode()
            head = {**head, "headers": list(head.get("headers", ()))}
            headers = MutableHeaders(scope=head)
            headers["content-type"] = "application/json"
            headers["content-length"] = str(len(self._body))
        await self._send(head)
        await self._send({**message, "body": self._body})


def _as_openais(status: int, body: bytes) -> Mapping[str, object] | None:
    """Return the error with the ``code`` that clients look for, or None to leave it as it is."""
    if status != HTTPStatus.BAD_REQUEST:
        return None
    answer = _read(body)
    error = answer.get("error")
    if not isinstance(error, dict) or _TOO_LONG.search(str(error.get("message"))) is None:
        return None
    return {**answer, "error": {**error, "code": "context_length_exceeded"}}


def as_anthropics(status: int, body: bytes) -> Mapping[str, object] | None:
    """Return Anthropic's form of an error of vLLM's, FastAPI's or a 401; None if unreadable."""
    answer = _read(body)
    error = answer.get("error", answer.get("detail"))
    said = error.get("message") if isinstance(error, dict) else error
    if not isinstance(said, str):
        return None
    if _TOO_LONG.search(said) and status == HTTPStatus.BAD_REQUEST:
        said = f"prompt is too long: {said}"
    kind = _ANTHROPICS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": said}}


def _read(body: bytes) -> dict[str, object]:
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


async def say_when_to_retry(arrival: Arrival) -> None:
    """Add ``Retry-After`` to a 429 or 503 that lacks it."""
    send = arrival.send

    async def say_when(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in _RETRYABLE:
            headers = list(message.get("headers", ()))
            if all(name.lower() != b"retry-after" for name, _ in headers):
                headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
                message = {**message, "headers": headers}
        await send(message)

    arrival.send = say_when
