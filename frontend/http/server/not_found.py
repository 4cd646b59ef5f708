"""Answer 404 in OpenAI's shape for models, stored answers and routes that do not exist."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from frontend.asgi import error_answer

MODEL: Final = "/v1/models/{name:path}"
STORED: Final = ("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel")

Listing: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
"""Returns the answer of ``/v1/models``."""

_TASKS: Final = {
    "/v1/chat/completions": "chats",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/translations": "translations",
    "/v1/embeddings": "embeddings",
    "/classify": "classification",
    "/score": "scores",
    "/v1/rerank": "reranking",
    "/pooling": "pooling",
}
"""Routes that show what a model is for."""


def look_up_models(app: FastAPI, listing: Listing) -> None:
    """Serve single models by name, with the listing's cards."""

    async def one(name: str) -> Response:
        cards = (await listing())["data"]
        for card in cards:
            if card["id"] == name:
                return JSONResponse(card)
        names = ", ".join(card["id"] for card in cards)
        return _missing(f"The model `{name}` does not exist: there are {names}.", "model")

    replace_route(app, MODEL, one, "GET")


def look_up_responses(app: FastAPI) -> None:
    """Answer that no responses are stored, rather than that this one is missing."""

    async def none(response_id: str, request: Request) -> Response:
        if request.method == "POST" and request.url.path.endswith(f"/{response_id}"):
            raise HTTPException(HTTPStatus.NOT_FOUND)  # /v1/responses/input_tokens, for one
        return _missing(
            f"There is no answer `{response_id}`: answers are not stored here. Keep what "
            "`/v1/responses` returned, or stream it.",
            "response_id",
        )

    for path in STORED:
        replace_route(app, path, none, "GET", "POST", "DELETE")


def replace_route(
    app: FastAPI, path: str, endpoint: Callable[..., Awaitable[Response]], *methods: str
) -> None:
    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", "") != path]
    app.add_api_route(path, endpoint, methods=[*methods], response_model=None)


async def say_what_there_is(request: Request, error: Exception) -> Response:
    """Answer an HTTPException, as FastAPI's handler; a 404 says what the model is for."""
    if not isinstance(error, HTTPException):
        raise error
    status = error.status_code
    said = str(error.detail)
    if status == HTTPStatus.NOT_FOUND:
        paths = {getattr(route, "path", "") for route in request.app.routes}
        tasks = ", ".join(f"{what} ({path})" for path, what in _TASKS.items() if path in paths)
        asked = f"{request.method} {request.url.path[:200]}"
        said = f"There is no {asked} for what is served here, which is for {tasks or 'nothing'}."
    answer = error_answer(said, status, kind="NotFoundError" if status == 404 else "")
    answer.headers.update(error.headers or {})
    return answer


def _missing(said: str, param: str) -> JSONResponse:
    return error_answer(said, HTTPStatus.NOT_FOUND, kind="NotFoundError", param=param)
