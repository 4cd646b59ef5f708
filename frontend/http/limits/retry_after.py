"""Every 429 and 503 says when to try again, wherever in the server it comes from."""

from frontend.asgi import RETRY_AFTER_S, App, Message, Receive, Scope, Send

_RETRYABLE = (429, 503)


class RetryAfter:
    """ASGI middleware that adds the header ``Retry-After`` where it is missing."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""

        async def say_when(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in _RETRYABLE:
                headers = list(message.get("headers", ()))
                if all(name.lower() != b"retry-after" for name, _ in headers):
                    headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
                    message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, say_when)
