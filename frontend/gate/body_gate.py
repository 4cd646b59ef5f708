"""ASGI middleware between admission and vLLM's app: parse each body once, judge it, pass it on.

JSON and forms alike.
"""

import json
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import FormData, Headers
from starlette.requests import Request

from common.errors import RequestRejectedError
from common.observability.telemetry import REQUESTS
from frontend.asgi import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    error_answer,
    has_body,
    once_more,
    route_path,
)
from frontend.gate.forms import read_form, texts_of
from frontend.gate.judge import judge
from frontend.gate.read import read
from frontend.gate.refused_fields import RefusedFieldError, check
from frontend.request_context import note_salt

_PARSED: Final = "mmrouter.body"
"""Where a request's scope has its parsed body."""

_FORM: Final = "mmrouter.form"
"""The same for a form."""

_FORMS: Final = ("multipart/", "application/x-www-form-urlencoded")


class BodyGate:
    """Refuse bodies beyond the limits of ``fields.py``, or with refused fields, with 400."""

    def __init__(
        self, app: App, max_choices: int, *, runs_tools: bool = False, root_path: str = ""
    ) -> None:
        """
        Args:
            max_choices: answers that one request may ask for.
            runs_tools: whether the server runs tools itself (``--tool-server``).
            root_path: prefix under which a proxy serves the app.
        """
        self._app = app
        self._max_choices = max_choices
        self._runs_tools = runs_tools
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, whose body is one message if it has one."""
        if scope["type"] == "http" and has_body(scope):
            message = await receive()
            receive = once_more(message, receive)
            take = self._take_form if _is_form(scope) else self._take_json
            try:
                take(scope, message)
            except RequestRejectedError as error:
                REQUESTS.labels(type(error).__name__).inc()
                refusal = _answer(error)
                await refusal(scope, receive, send)
                return
            del message
        await self._app(scope, receive, send)

    def _take_json(self, scope: Scope, message: Message) -> None:
        try:
            body = read(message.get("body", b""))
        except ValueError:
            return  # vLLM's app parses it again, and says what is wrong as its clients know it
        judge(body, self._max_choices)
        check(route_path(scope, self._root_path), body, runs_tools=self._runs_tools)
        scope[_PARSED] = body
        note_salt(body)

    def _take_form(self, scope: Scope, message: Message) -> None:
        form = read_form(message.get("body", b""), Headers(scope=scope)["content-type"])
        judge(texts_of(form), self._max_choices)
        scope[_FORM] = form
        message["body"] = b""  # files are copies, and nothing else reads it


def take_parsed_bodies() -> None:
    """Let all apps of this process take the bodies that a gate has parsed."""
    # FastAPI makes its requests itself.
    Request.json, Request.form = _json, _form  # type: ignore[assignment, method-assign]


def form_of(scope: Scope) -> FormData | None:
    """Return the form of a request that passed a gate, if it has one."""
    return scope.get(_FORM)


async def _json(self: Request) -> Any:
    if _PARSED in self.scope:
        return self.scope[_PARSED]
    if _is_form(self.scope):  # no way past the gate
        raise json.JSONDecodeError("a form is no JSON", "", 0)
    return json.loads(await self.body())


async def _form(self: Request, **_: float) -> FormData:
    return form_of(self.scope) or FormData()


def _answer(error: RequestRejectedError) -> App:
    field = error.field if isinstance(error, RefusedFieldError) else None
    return error_answer(str(error), HTTPStatus.BAD_REQUEST, kind="BadRequestError", param=field)


def _is_form(scope: Scope) -> bool:
    return Headers(scope=scope).get("content-type", "").lower().startswith(_FORMS)
