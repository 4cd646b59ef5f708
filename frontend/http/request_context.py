"""What all that is done for a request can learn from its context: its id, and its trace."""

import itertools
import secrets

from common.log_lines import current_request
from common.tracing import of_http, span_of_request
from frontend.asgi import App, Message, Receive, Scope, Send, engine_calls

_FREE = ("GET", "HEAD", "OPTIONS")


class RequestIds:
    """ASGI middleware that names each request, for log lines and for the workers. The client's own
    name for it may come again, and be anything.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            current_request.set(secrets.token_hex(16))
            engine_calls.set(itertools.count())
        await self._app(scope, receive, send)


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
