"""The ASGI app that is there from the first moment.

Until a worker has registered nobody knows the model, so vLLM's app can't exist; the
front door answers 503 in vLLM's error shape. Afterwards it passes everything on.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from http import HTTPStatus

from fastapi import FastAPI

from common.errors import NoWorkerError
from frontend.asgi import Receive, Scope, Send, error_answer


class FrontDoor:
    """503 until :meth:`open`, then vLLM's app."""

    def __init__(self, reason: Callable[[], None]) -> None:
        """
        Args:
            reason: raises NoWorkerError with what is known of why nobody is there.
        """
        self._reason = reason
        self._app: FastAPI | None = None
        self._lifespan = AsyncExitStack()

    async def open(self, app: FastAPI) -> None:
        """Start the app and let requests in."""
        await self._lifespan.enter_async_context(app.router.lifespan_context(app))
        self._app = app

    async def close(self) -> None:
        """Stop the app."""
        self._app = None
        await self._lifespan.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._closed(scope, receive, send)

    async def _closed(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = "the first worker has registered and its model is being loaded"
        try:
            self._reason()
        except NoWorkerError as error:
            message = str(error)
        answer = error_answer(message, HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "1"})
        await answer(scope, receive, send)
