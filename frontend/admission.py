"""How many requests this frontend works on at once; one more is refused before it is read.

Every request with a body is work. Those without, such as ``/health`` and ``/v1/models``,
are answered from memory and always let through.
"""

from common.errors import OverloadedError
from common.telemetry import INFLIGHT_REQUESTS, REQUESTS
from frontend.asgi import App, Receive, Scope, Send, overload_answer

_FREE = ("GET", "HEAD", "OPTIONS")


class Admission:
    """ASGI middleware that answers 429 when too many requests are in flight."""

    def __init__(self, app: App, limit: int) -> None:
        """
        Args:
            limit: requests in flight at once, from the head of a request to the last
                byte of its answer.
        """
        self._app = app
        self._limit = limit
        self._inflight = 0
        INFLIGHT_REQUESTS.set_function(lambda: self._inflight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] in _FREE:
            await self._app(scope, receive, send)
            return
        if self._inflight >= self._limit:
            error = OverloadedError(
                f"this frontend is working on {self._limit} requests already: try again later"
            )
            REQUESTS.labels(type(error).__name__).inc()
            await overload_answer(error)(scope, receive, send)
            return
        self._inflight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inflight -= 1
