"""Put the id and the trace of a request into its context."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import MutableHeaders

from common.observability.log_lines import current_request
from common.observability.tracing import enabled, of_http, span_of_request
from frontend.asgi import Arrival, Message, Send

_HEADER = "X-Request-Id"


async def name_request(arrival: Arrival, *, answered: bool = False) -> None:
    """Name a request, for log lines and workers: clients' ids may repeat, or hold anything. If
    ``answered``, return the client's id, or else ours, as ``X-Request-Id``.
    """
    name = secrets.token_hex(16)
    current_request.set(name)
    if answered:
        arrival.send = _naming(arrival.headers.get(_HEADER, name), arrival.send)


def _naming(name: str, send: Send) -> Send:
    async def say_name(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            MutableHeaders(scope=message)[_HEADER] = name
        await send(message)

    return say_name


async def trace(arrival: Arrival) -> None:
    """Record a span of a work request, as a child of the client's if there is one."""
    if enabled() and arrival.asks_for_work:
        arrival.held.enter_context(_span(arrival))


@contextmanager
def _span(arrival: Arrival) -> Iterator[None]:
    scope, send = arrival.scope, arrival.send
    status = 0

    async def watch(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    arrival.send = watch
    with span_of_request("request", of_http(scope["headers"])) as span:
        try:
            yield
        finally:
            if span is not None:
                # The route and not the path, which may hold anything.
                route = getattr(scope.get("route"), "path", "unknown route")
                span.rename(f"{scope['method']} {route}")
                span.set({"http.request.method": scope["method"], "http.route": route})
                if status:
                    span.set({"http.response.status_code": status})
                if status >= 500 or not status:
                    span.end(str(status) if status else "no answer")
