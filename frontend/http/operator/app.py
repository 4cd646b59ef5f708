"""What operators and scrapers ask for, while there is no model's app as well: from the first second
on, until the last.
"""

import re
from collections.abc import Iterable
from typing import Final

from fastapi import APIRouter, FastAPI
from starlette.responses import Response

from frontend.http.operator.exposition import TEXT_FORMAT
from frontend.http.operator.merged_metrics import own_metrics

_PATHS: Final = re.compile(r"/+(?:livez|metrics|mmrouter|status)(?:/|$)")


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


def operator_app(routers: Iterable[APIRouter], root_path: str) -> FastAPI:
    """Return an app with some routes, and with the metrics of this process."""
    app = FastAPI(openapi_url=None, root_path=root_path)
    for router in routers:
        app.include_router(router)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(own_metrics(), media_type=TEXT_FORMAT)

    return app
