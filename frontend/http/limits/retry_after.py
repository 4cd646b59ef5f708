"""Every 429 and 503 says when to try again, wherever in the server it comes from."""

from frontend.asgi import RETRY_AFTER_S, Arrival, Message

_RETRYABLE = (429, 503)


async def say_when_to_retry(arrival: Arrival) -> None:
    """Add the header ``Retry-After`` to the answer where it is missing."""
    send = arrival.send

    async def say_when(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in _RETRYABLE:
            headers = list(message.get("headers", ()))
            if all(name.lower() != b"retry-after" for name, _ in headers):
                headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
                message = {**message, "headers": headers}
        await send(message)

    arrival.send = say_when
