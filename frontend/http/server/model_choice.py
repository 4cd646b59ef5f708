"""Several models behind one endpoint: each request goes to the app of the model that it names.

Whether a model may be asked for is said by the app itself, so a request for one that nobody has
goes to one that has such requests, and gets vLLM's own 404. What names no model, such as
``/health``, goes to an app whose workers are there.
"""

import asyncio
import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

import msgspec

from frontend.asgi import (
    RETRY_AFTER_S,
    App,
    Receive,
    Scope,
    Send,
    error_answer,
    has_body,
    once_more,
    route_path,
)
from frontend.gate import form_of
from frontend.http.access.admin import is_for_admins
from frontend.request_context import current_context


class _Named(msgspec.Struct):
    model: object = None


_names: Final = msgspec.json.Decoder(_Named)


@dataclass(eq=False)
class ModelApp:
    """What serves one model.

    Attributes:
        names: of the model.
        adapters: names of its adapters, a live view.
        available: whether there is a worker for it.
        defers: whether its media are decoded where they are processed.
        routes: whether it has such requests at all: which it has depends on the kind of model.
        requests: that it works on.
        idle: set while there are none.
    """

    names: list[str]
    adapters: Container[str]
    app: App
    available: Callable[[], bool]
    defers: bool
    routes: Callable[[Scope], bool]
    requests: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        self.requests += 1
        self.idle.clear()
        current_context().defers = self.defers
        try:
            await self.app(scope, receive, send)
        finally:
            self.requests -= 1
            if not self.requests:
                self.idle.set()


class ModelChoice:
    """Passes each request on to the app of its model.

    Attributes:
        apps: of the models that are served, the first that came first.
    """

    def __init__(self, coming: Callable[[str], bool], root_path: str = "") -> None:
        """
        Args:
            coming: whether a model of a name has workers, and will be served.
            root_path: prefix under which a proxy serves the app.
        """
        self.apps: list[ModelApp] = []
        self._coming = coming
        self._root_path = root_path

    def of(self, name: str) -> ModelApp | None:
        """What serves a model or an adapter. If two models have adapters of one name, that of the
        one that came first; a model goes before any adapter."""
        return next(
            (app for app in self.apps if name in app.names),
            next((app for app in self.apps if name in app.adapters), None),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, whose body is one message if it has one."""
        app: App | None = self._anyone(scope)
        if scope["type"] == "http" and scope["method"] == "POST" and has_body(scope):
            message = await receive()
            name = _model_of(message.get("body", b""), scope)
            receive = once_more(message, receive)
            del message
            app = self._named(name, scope) or app
        await (app or _NOBODY)(scope, receive, send)

    def _named(self, name: str | None, scope: Scope) -> App | None:
        """What is to answer to a request with a body; None for any app.

        Args:
            name: that the body says.
        """
        if name is None or is_for_admins(route_path(scope, self._root_path)):
            return None
        if not name:
            return _say_which(self.apps) if len(self.apps) > 1 else None
        chosen = self.of(name)
        return _say_loading(name) if chosen is None and self._coming(name) else chosen

    def _anyone(self, scope: Scope) -> ModelApp | None:
        """The first that has such requests and a worker, or else one of the two, or else any."""
        return max(self.apps, key=lambda app: (app.routes(scope), app.available()), default=None)


_NOBODY: Final = error_answer("no model is served at the moment", HTTPStatus.SERVICE_UNAVAILABLE)


def _say_which(apps: Sequence[ModelApp]) -> App:
    names = ", ".join(app.names[0] for app in apps)
    message = f"this endpoint serves several models, so `model` must name one of them: {names}"
    return error_answer(message, HTTPStatus.BAD_REQUEST)


def _say_loading(name: str) -> App:
    message = f"the model `{name}` is being loaded"
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return error_answer(message, HTTPStatus.SERVICE_UNAVAILABLE, headers)


def _model_of(body: bytes, scope: Scope) -> str | None:
    """The name that a body says, empty if it says none; None if it is nothing that can be read.

    A guess is good enough: an app looks at the name itself. Of 64 MB all else is read over in some
    25 ms.
    """
    if (form := form_of(scope)) is not None:
        named = form.get("model")
        return named if isinstance(named, str) else ""
    try:
        model = _names.decode(body).model
    except ValueError:
        try:
            said = json.loads(body)  # which takes NaN, and other encodings
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict):
            return None
        model = said.get("model")
    if model is None:
        return ""
    return model if isinstance(model, str) else None
