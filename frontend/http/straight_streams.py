"""Events of a stream pass by layers of the server that look at its head only.

A layer of ASGI that wants to see the head of an answer is called for every event of it too. Between
vLLM's streams and :class:`frontend.http.early_stream_errors.EarlyStreamErrors` there are five.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from starlette.middleware import Middleware
from starlette.responses import StreamingResponse
from vllm.entrypoints.openai.chat_completion import api_router as chat
from vllm.entrypoints.openai.completion import api_router as completion

from frontend.asgi import Receive, Scope, Send

_WAY: Final = "mmrouter.straight_way"

_HEADS_ONLY: Final = frozenset(
    {
        "prometheus_fastapi_instrumentator.middleware.PrometheusInstrumentatorMiddleware",
        "starlette.middleware.cors.CORSMiddleware",
        "vllm.entrypoints.serve.elastic_ep.middleware.ScalingMiddleware",
        "vllm.entrypoints.serve.middleware.x_request_id.XRequestIdMiddleware",
    }
)


def install(middleware: Iterable[Middleware]) -> None:
    """Let vLLM's streams go straight, unless a layer of the server may look at events.

    Args:
        middleware: the layers.
    """
    classes: list[object] = [each.cls for each in middleware]
    if all(_name(each) in _HEADS_ONLY for each in classes):
        for module in (chat, completion):
            vars(module)["StreamingResponse"] = StraightStream


def _name(layer: object) -> str:
    """Of a class; what else makes layers is none of those that are known."""
    return f"{layer.__module__}.{layer.__qualname__}" if isinstance(layer, type) else ""


def offer_way(scope: Scope) -> list[Send]:
    """Where whoever is between these layers and the client puts how to send to that, once the head
    of a stream has gone.
    """
    way: list[Send] = scope.setdefault(_WAY, [])
    return way


class StraightStream(StreamingResponse):
    """Sends its head, its first event and its end as any other, and the rest straight."""

    _way: Sequence[Send] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        self._way = scope.get(_WAY, ())
        await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send all of it."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        shortest = send
        async for event in self.body_iterator:
            body = event.encode(self.charset) if isinstance(event, str) else event
            await shortest({"type": "http.response.body", "body": body, "more_body": True})
            if self._way:
                shortest = self._way[0]
        await send({"type": "http.response.body", "body": b"", "more_body": False})
