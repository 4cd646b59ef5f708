"""Events of a stream pass by layers of the server that look at its head only.

A layer of ASGI that wants to see the head of an answer is called for every event of it too. Between
vLLM's streams and :class:`.early_stream_errors.EarlyStreamErrors` there are five.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from starlette.middleware import Middleware
from starlette.responses import StreamingResponse
from vllm.entrypoints.openai.chat_completion import api_router as chat
from vllm.entrypoints.openai.completion import api_router as completion

from frontend.asgi import Scope, Send
from frontend.http.limits.connection import WRITE_NOW
from frontend.http.streaming import keep_alive
from frontend.request import DirectEvents, current_events


@dataclass
class Way:
    """Past the layers.

    Attributes:
        send: to whoever is between them and the client, once the head of a stream has gone.
        events: what may be sent past everybody.
    """

    send: Send | None = None
    events: DirectEvents | None = None

    def close(self) -> None:
        """The HTTP request has ended. Its context may go on, with connections that it opened."""
        self.send = None
        if self.events is not None:
            self.events.close()


_way: Final[ContextVar[Way | None]] = ContextVar("way past the layers", default=None)
"""Of the HTTP request that this task works on."""

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
        keep_alive.install()


def _name(layer: object) -> str:
    """Of a class; what else makes layers is none of those that are known."""
    return f"{layer.__module__}.{layer.__qualname__}" if isinstance(layer, type) else ""


def offer_way(scope: Scope) -> Way:
    """What whoever is between these layers and the client fills in once the head has gone."""
    write = scope.get(WRITE_NOW)
    way = Way(events=None if write is None else DirectEvents(write))
    _way.set(way)
    current_events.set(way.events)
    return way


class StraightStream(StreamingResponse):
    """Sends its head, its first event and its end as any other, and the rest straight."""

    async def stream_response(self, send: Send) -> None:
        """Send all of it."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        shortest, way, events = send, _way.get(), current_events.get()
        async for event in self.body_iterator:
            body = event.encode(self.charset) if isinstance(event, str) else event
            await shortest({"type": "http.response.body", "body": body, "more_body": True})
            if way is not None and way.send is not None:
                shortest = way.send
                if events is not None and events.learns:
                    events.saw(bytes(body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
