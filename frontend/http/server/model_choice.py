"""Several models behind one endpoint: each request goes to the app of the model that it names.

An app decides whether a model exists, so a request for an unknown one goes to an app with that
route, and gets vLLM's own 404. Requests without a model, such as ``/health``, go to an app that has
workers.
"""

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from frontend.asgi import (
    RETRY_AFTER_S,
    App,
    Receive,
    Scope,
    Send,
    error_answer,
    has_body,
    route_path,
)
from frontend.gate import body_of
from frontend.http.access.admin import is_for_admins
from frontend.request_context import current_context


@dataclass(eq=False)
class ModelApp:
    """The app of one model.

    Attributes:
        adapters: their names, a live view.
        available: whether there is a worker for it.
        defers: whether its media are decoded where they are processed.
        routes: whether it has a route, which depends on the kind of model.
        requests: running ones.
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
    """Pass each request on to the app of its model; ``apps`` are in order of arrival."""

    def __init__(self, coming: Callable[[str], bool], root_path: str = "") -> None:
        """``coming`` tells whether a model has workers and will be served."""
        self.apps: list[ModelApp] = []
        self._coming = coming
        self._root_path = root_path

    def of(self, name: str) -> ModelApp | None:
        """Return the app of a model, or else the first one with an adapter of that name."""
        return next(
            (app for app in self.apps if name in app.names),
            next((app for app in self.apps if name in app.adapters), None),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        app: App | None = self._anyone(scope)
        if scope["type"] == "http" and scope["method"] == "POST" and has_body(scope):
            app = self._named(_model_of(scope), scope) or app
        await (app or _NOBODY)(scope, receive, send)

    def _named(self, name: str | None, scope: Scope) -> App | None:
        """Return the app for the model that a body names; None for any app."""
        if name is None or is_for_admins(route_path(scope, self._root_path)):
            return None
        if not name:
            return _say_which(self.apps) if len(self.apps) > 1 else None
        chosen = self.of(name)
        return _say_loading(name) if chosen is None and self._coming(name) else chosen

    def _anyone(self, scope: Scope) -> ModelApp | None:
        """Return an app, preferably with the route, then with a worker."""
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


def _model_of(scope: Scope) -> str | None:
    """Return the model that a body names; empty if it names none, None if it is unreadable."""
    body = body_of(scope)
    model = body.get("model") or "" if isinstance(body, Mapping) else None
    return model if isinstance(model, str) else None
