"""``/status``: a page for people. It draws what ``/mmrouter/*`` and ``/metrics`` say, with the key
that its user gives it, and says nothing by itself.
"""

from functools import partial
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response

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


def page_routes() -> APIRouter:
    """The page and what it is made of."""
    api = APIRouter(include_in_schema=False)
    for path, (name, kind) in _FILES.items():
        answer = partial(_answer, (_FOLDER / name).read_bytes(), kind)
        api.add_route(path, answer, methods=["GET", "HEAD"])
    return api


async def _answer(content: bytes, kind: str, _: Request) -> Response:
    return Response(content, media_type=kind, headers=_HEADERS)
