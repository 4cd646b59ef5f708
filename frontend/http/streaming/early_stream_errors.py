"""Turn a stream that fails before its first byte into an error with a status.

vLLM's server answers 200 as soon as a prompt is rendered, and reports later errors, e.g. that all
workers are busy, as the only event. A client or load balancer would see a success.
"""

import re
from http import HTTPStatus
from typing import Final

from pydantic import ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from frontend.asgi import Arrival, Message, Send
from frontend.http.limits.connection import WRITE_NOW
from frontend.request import DirectEvents

_ERROR_EVENT: Final = re.compile(rb'(?:event: \w+\n)?data: (\{"error".*)')


async def hold_stream_heads(arrival: Arrival) -> None:
    """Hold a stream's head back until its first event; offer later ones the direct way."""
    write = arrival.scope.get(WRITE_NOW)
    if write is not None:
        events = DirectEvents(write)
        arrival.context.put(events)
        arrival.held.callback(events.close)
    send = arrival.send
    head: Message | None = None
    failed = False

    async def hold(message: Message) -> None:
        nonlocal head, failed
        if failed:
            return  # the end of a stream that became an error
        if _starts_stream(message):
            head = message
            return
        if head is not None:
            held, head = head, None
            error = _error_in(message.get("body", b""))
            if error is not None:
                failed = True
                await _send_error(held, error, send)
                return
            await send(held)
        await send(message)

    arrival.send = hold


def _starts_stream(message: Message) -> bool:
    return (
        message["type"] == "http.response.start"
        and message["status"] == HTTPStatus.OK
        and any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message.get("headers", ())
        )
    )


def _error_in(body: bytes) -> ErrorResponse | None:
    event = _ERROR_EVENT.match(body)
    if event is None:
        return None
    try:
        return ErrorResponse.model_validate_json(event[1])
    except ValidationError:
        return None  # not vLLM's: a stream like any other


async def _send_error(head: Message, error: ErrorResponse, send: Send) -> None:
    body = error.model_dump_json().encode()
    headers = [
        (name, value)
        for name, value in head.get("headers", ())
        if name.lower() not in (b"content-type", b"content-length")
    ]
    headers.append((b"content-type", b"application/json"))
    headers.append((b"content-length", b"%d" % len(body)))
    await send({**head, "status": error.error.code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
