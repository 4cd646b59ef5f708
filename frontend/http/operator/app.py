"""What operators and scrapers ask for, while there is no model's app as well: from the first second
on, until the last.

The page ``/status`` draws what ``/mmrouter/*`` and ``/metrics`` say, with the key that its user
gives it, and says nothing by itself.
"""

import re
from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from frontend.asgi import error_answer
from frontend.http.operator.exposition import TEXT_FORMAT
from frontend.http.operator.merged_metrics import own_metrics

_FOLDER: Final = Path(__file__).parent / "page"

_FILES: Final = {
    "/status": ("status.html", "text/html"),
    "/status/status.css": ("status.css", "text/css"),
    "/status/status.js": ("status.js", "text/javascript"),
}

PAGE: Final = frozenset(_FILES)
"""Paths of the page."""

_HEADERS: Final = {
    # Whatever a name holds, nothing runs but the page's own script.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

_PATHS: Final = re.compile(r"/+(?:livez|metrics|mmrouter|status)(?:/|$)")


def page_routes() -> APIRouter:
    """Serve ``/status``, the page for people, and what it is made of."""
    api = APIRouter(include_in_schema=False)
    for path, (name, kind) in _FILES.items():
        answer = partial(_answer, (_FOLDER / name).read_bytes(), kind)
        api.add_route(path, answer, methods=["GET", "HEAD"])
    return api


async def _answer(content: bytes, kind: str, _: Request) -> Response:
    return Response(content, media_type=kind, headers=_HEADERS)


def is_for_operators(path: str) -> bool:
    """Return whether a path, without a proxy's prefix, is one that this app may have."""
    return _PATHS.match(path) is not None


def live_routes() -> APIRouter:
    """Return the route by which Kubernetes knows that the event loop runs, workers or not."""
    api = APIRouter(tags=["mmrouter"])

    @api.get("/livez")
    async def live() -> Response:
        """Answer 200 as long as this process does anything."""
        return Response()

    return api


async def _refuse(_: Request, error: HTTPException) -> Response:
    """Say it in the shape of all other errors."""
    answer = error_answer(str(error.detail), HTTPStatus(error.status_code))
    answer.headers.update(error.headers or {})
    return answer


def operator_app(routers: Iterable[APIRouter], root_path: str) -> FastAPI:
    """Return an app with some routes, and with the metrics of this process."""
    app = FastAPI(
        openapi_url=None, root_path=root_path, exception_handlers={HTTPException: _refuse}
    )
    for router in routers:
        app.include_router(router)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(own_metrics(), media_type=TEXT_FORMAT)

    return app
