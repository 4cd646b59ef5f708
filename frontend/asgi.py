"""ASGI's own types, and an error answer in vLLM's shape. Nothing here decides anything."""

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, TypeAlias

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from common.errors import OverloadedError

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_AFTER_S = 1
"""When to try again, if nobody knows better."""


def error_answer(
    message: str,
    status: HTTPStatus,
    headers: dict[str, str] | None = None,
    *,
    kind: str = "",
    param: str | None = None,
) -> JSONResponse:
    """A response that says in vLLM's shape what is wrong.

    Args:
        kind: what vLLM calls the error, if that does not follow from its status.
        param: the field that is wrong.
    """
    if not kind:
        unavailable = status is HTTPStatus.SERVICE_UNAVAILABLE
        kind = "ServiceUnavailableError" if unavailable else status.phrase
    body = ErrorResponse(
        error=ErrorInfo(message=message, type=kind, param=param, code=status.value)
    )
    return JSONResponse(body.model_dump(), status.value, headers=headers)


def overload_answer(error: OverloadedError) -> JSONResponse:
    """The same for a request that there is no room for."""
    return error_answer(str(error), error.status, {"Retry-After": str(error.retry_after_s)})


def once_more(message: Message, receive: Receive) -> Receive:
    """What gives a message that was received already, and then what comes after it."""
    given: Message | None = message

    async def again() -> Message:
        nonlocal given
        if given is None:
            return await receive()
        first, given = given, None
        return first

    return again


def has_body(scope: Scope) -> bool:
    """Whether a request's head announces a body, be it an empty one in pieces."""
    headers = Headers(scope=scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def route_path(scope: Scope, root_path: str) -> str:
    """The path by which routes are found.

    Args:
        root_path: prefix under which a proxy serves the app.
    """
    return str(scope["path"]).removeprefix(root_path)
