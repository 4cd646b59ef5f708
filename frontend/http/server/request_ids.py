"""What all that is done for a request can learn from its context: its id, and its trace."""

import itertools
import secrets

from starlette.datastructures import Headers, MutableHeaders

from common.observability.log_lines import current_request
from common.observability.tracing import of_http, span_of_request
from frontend.asgi import App, Message, Receive, Scope, Send
from frontend.request_context import begin

_HEADER = "X-Request-Id"
_FREE = ("GET", "HEAD", "OPTIONS")


class RequestIds:
    """ASGI middleware that names each request, for log lines and for the workers. The client's own
    name for it may come again, and be anything.
    """

    def __init__(self, app: App, *, answered: bool = False) -> None:
        """
        Args:
            answered: whether answers say it, or the client's name, as ``X-Request-Id``.
        """
        self._app = app
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            name = secrets.token_hex(16)
            current_request.set(name)
            begin(itertools.count())
            if self._answered:
                send = _naming(Headers(scope=scope).get(_HEADER, name), send)
        await self._app(scope, receive, send)


def _naming(name: str, send: Send) -> Send:
    async def say_name(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            MutableHeaders(scope=message)[_HEADER] = name
        await send(message)

    return say_name


class Traced:
    """ASGI middleware that makes a span of each request which asks for work, a child of the
    client's if it says so. GETs make none.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] in _FREE:
            await self._app(scope, receive, send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with span_of_request("request", of_http(scope["headers"])) as span:
            try:
                await self._app(scope, receive, watch)
            finally:
                if span is not None:
                    # The route and not the path, in which anything may stand.
                    route = getattr(scope.get("route"), "path", "unknown route")
                    span.rename(f"{scope['method']} {route}")
                    span.set({"http.request.method": scope["method"], "http.route": route})
                    if status:
                        span.set({"http.response.status_code": status})
                    if status >= 500 or not status:
                        span.end(str(status) if status else "no answer")
