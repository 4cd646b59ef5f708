"""The ASGI app that is there from the first moment.

Until a worker has registered nobody knows the model, so vLLM's app can't exist; the
front door answers 503 in vLLM's error shape. Afterwards it passes everything on.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from fastapi import FastAPI
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from common.errors import NoWorkerError

Scope: TypeAlias = MutableMapping[str, Any]  # ASGI's own type
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


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
        body = ErrorResponse(
            error=ErrorInfo(message=message, type="ServiceUnavailableError", code=503)
        )
        response = JSONResponse(body.model_dump(), 503, headers={"Retry-After": "1"})
        await response(scope, receive, send)
