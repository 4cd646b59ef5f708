"""Operators' app: status page, liveness, version and metrics, also while no model is loaded.

The page ``/status`` draws ``/mmrouter/*`` and ``/metrics`` with the key that its user enters, and
contains no data itself.
"""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.vllm_compat.features import BUILD
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
"""Paths of the status page."""

_HEADERS: Final = {
    # Names shown on the page may hold markup: only the page's own script runs.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

_PATHS: Final = re.compile(r"/+(?:livez|metrics|mmrouter|status|version)(?:/|$)")


def page_routes() -> APIRouter:
    """Serve ``/status``, the page for people, with its files."""
    api = APIRouter(include_in_schema=False)
    for path, (name, kind) in _FILES.items():
        answer = partial(_answer, (_FOLDER / name).read_bytes(), kind)
        api.add_route(path, answer, methods=["GET", "HEAD"])
    return api


async def _answer(content: bytes, kind: str, _: Request) -> Response:
    return Response(content, media_type=kind, headers=_HEADERS)


def is_for_operators(path: str) -> bool:
    """Return whether a path, without a proxy's prefix, may belong to this app."""
    return _PATHS.match(path) is not None


def live_routes() -> APIRouter:
    """Return Kubernetes's liveness probe: it needs a running event loop, and no worker."""
    api = APIRouter(tags=["mmrouter"])

    @api.get("/livez")
    async def live() -> Response:
        """Answer 200 while the event loop runs."""
        return Response()

    return api


async def _refuse(_: Request, error: HTTPException) -> Response:
    answer = error_answer(str(error.detail), error.status_code)
    answer.headers.update(error.headers or {})
    return answer


def operator_app(routers: Iterable[APIRouter], root_path: str) -> FastAPI:
    """Return an app with these routes and the metrics of this process."""
    app = FastAPI(
        openapi_url=None, root_path=root_path, exception_handlers={HTTPException: _refuse}
    )
    for router in routers:
        app.include_router(router)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(own_metrics(), media_type=TEXT_FORMAT)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": BUILD}

    return app
