"""``/metrics`` of a frontend of several processes: the samples of all, each with its process.

Sums are left to whoever reads them (``sum without (process)``): gauges of one process are as
telling as counters, and a counter that starts anew with its process is one that scrapers know.
"""

from collections.abc import Mapping
from http import HTTPMethod

from prometheus_client import REGISTRY, generate_latest
from starlette.responses import Response

from frontend.asgi import App, Receive, Scope, Send, route_path
from frontend.http.operator.exposition import TEXT_FORMAT, Joined, read_page
from frontend.processes import Siblings

TOPIC = "metrics"


class MergedMetrics:
    """ASGI middleware that answers ``/metrics`` for all processes."""

    def __init__(self, app: App, siblings: Siblings, root_path: str = "") -> None:
        self._app = app
        self._siblings = siblings
        self._root_path = root_path
        siblings.tell(TOPIC, lambda _: own_metrics())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if (
            scope["type"] != "http"
            or scope["method"] != HTTPMethod.GET
            or route_path(scope, self._root_path).rstrip("/") != "/metrics"
        ):
            await self._app(scope, receive, send)
            return
        pages = {self._siblings.name: own_metrics()}
        pages.update(await self._siblings.ask(TOPIC))
        answer = Response(await merge(pages), media_type=TEXT_FORMAT)
        await answer(scope, receive, send)


def own_metrics() -> bytes:
    """The page of this process, in Prometheus's text format."""
    return generate_latest(REGISTRY)


async def merge(pages: Mapping[str, bytes]) -> bytes:
    """One page from several.

    Args:
        pages: by process, as ``prometheus_client`` writes them.
    """
    joined = Joined()
    for process, page in sorted(pages.items()):
        await read_page(page, "process", process, joined)
    return b"".join(joined)
