"""ASGI's own types, the door that requests come in by, and errors in vLLM's shape."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from http import HTTPStatus
from http.client import responses
from typing import Any, Final, TypeAlias

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMError, VLLMValidationError

from common.errors import MmRouterError, OutOfFilesError, OverloadedError
from frontend.request_context import begin

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

LACKING: Final = "a request got 503: %r. Raise the limit on open files, processes or memory"

RETRY_AFTER_S = 1
"""Default of ``Retry-After``, in seconds."""

_FREE = ("GET", "HEAD", "OPTIONS")


class Arrival:
    """A request at the door.

    Attributes:
        receive: gives the body, unless a step has read it.
        send: takes the answer; steps may wrap it.
        app: gets the request after the last step.
        body: the whole body, once a step has read it.
        held: closed in reverse order when the request ends.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, app: App, prefix: str) -> None:
        """``prefix`` is the path prefix under which a proxy serves the app."""
        self.scope = scope
        self.receive = receive
        self.send = send
        self.app = app
        self.context = begin()
        self.context.peer = (scope.get("client") or ("",))[0]
        self.body: bytes | None = None
        self.held = self.context.held
        self._prefix = prefix

    @cached_property
    def headers(self) -> Headers:
        return Headers(scope=self.scope)

    @cached_property
    def path(self) -> str:
        return route_path(self.scope, self._prefix)

    @cached_property
    def has_body(self) -> bool:
        return has_body(self.scope)

    @property
    def asks_for_work(self) -> bool:
        """Whether the method is not GET, HEAD or OPTIONS, which are answered from memory."""
        return self.scope["method"] not in _FREE

    def pass_on(self, app: App) -> Awaitable[None]:
        """Call an app. A body that a step has read reaches it as one message."""
        receive = self.receive
        if self.body is not None:
            message = {"type": "http.request", "body": self.body, "more_body": False}
            receive = once_more(message, receive)
            self.body = None  # the app's now, to let go of as early as it likes
        return app(self.scope, receive, self.send)


Step: TypeAlias = Callable[[Arrival], Awaitable[App | None]]
"""Inspect a request. Return an app that answers it in place of all later steps, or None."""

ENTRIES: Final = 8
"""Requests that begin in two turns of the event loop. An answer needs some 25 turns, and in each of
them all of 100 connections asked for ``/version`` again: a chat of 8 tokens took as long as they
did."""


class Door:
    """ASGI middleware: pass each request through steps, in order."""

    def __init__(
        self, app: App, steps: Sequence[Step], *, sockets: Sequence[Step] = (), root_path: str = ""
    ) -> None:
        """``sockets`` are the steps of WebSockets; ``root_path`` is a proxy's path prefix."""
        self._app = app
        self._steps = {"http": steps, "websocket": sockets}
        self._root_path = root_path
        self._entries = asyncio.Semaphore(ENTRIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._entries:
            await asyncio.sleep(0)
        arrival = Arrival(scope, receive, send, self._app, self._root_path)
        with arrival.held:
            for step in self._steps.get(scope["type"], ()):
                try:
                    answer = await step(arrival)
                except MemoryError as error:
                    logger.warning(LACKING, error)
                    answer = overload_answer(OutOfFilesError())
                    answer.headers["connection"] = "close"  # the body may not be read
                if answer is not None:
                    await arrival.pass_on(answer)
                    return
            await arrival.pass_on(arrival.app)


async def unanswered(scope: Scope, receive: Receive, send: Send) -> None:
    """Send nothing: the client is gone."""


def error_answer(
    message: str,
    status: int,
    headers: dict[str, str] | None = None,
    *,
    kind: str = "",
    param: str | None = None,
) -> JSONResponse:
    """Return an error in vLLM's shape. ``kind`` defaults to vLLM's name for the status, which
    Python need not know: a middleware may answer 529.
    """
    kind = kind or responses.get(status, "Error")
    body = ErrorResponse(error=ErrorInfo(message=message, type=kind, param=param, code=int(status)))
    return JSONResponse(body.model_dump(), int(status), headers=headers)


def overload_answer(error: OverloadedError) -> JSONResponse:
    return error_answer(str(error), error.status, {"Retry-After": str(error.retry_after_s)})


def once_more(message: Message, receive: Receive) -> Receive:
    """Return a receive that gives a message again, and then those after it."""
    given: Message | None = message

    async def again() -> Message:
        nonlocal given
        if given is None:
            return await receive()
        first, given = given, None
        return first

    return again


def has_body(scope: Scope) -> bool:
    """Return whether the head announces a body, even an empty chunked one."""
    headers = Headers(scope=scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def route_path(scope: Scope, root_path: str) -> str:
    """Return the path that routes match, without the prefix under which a proxy serves the app.

    As Starlette: the prefix ends where a name of the path does, or it is none. ``/`` as a prefix
    would make of ``/mmrouter`` a path that no guard knows, and a route serves.
    """
    path = str(scope["path"])
    rest = path.removeprefix(root_path)
    return path if rest and not rest.startswith("/") else rest


def as_vllm_error(error: MmRouterError) -> VLLMError:
    """Return the error of vLLM's that its server answers with the same status."""
    if error.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
        return VLLMValidationError(str(error))
    if error.status is HTTPStatus.INTERNAL_SERVER_ERROR:
        return GenerationError(str(error))
    return GracefulHTTPError(str(error), error.status)


@contextmanager
def blaming_a_lack_of_files() -> Iterator[None]:
    """Raise a 503 in place of an error that a lack of files caused: decoders, processors and
    fetches say that the medium is at fault.
    """
    try:
        yield
    except (MmRouterError, OSError, RuntimeError, ValueError, VLLMError) as error:
        if not OutOfFilesError.caused(error):
            raise
        raise as_vllm_error(OutOfFilesError()) from error
