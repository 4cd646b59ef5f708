"""``/metrics`` of a frontend of several processes: the samples of all, each with its process.

Sums are left to whoever reads them (``sum without (process)``): gauges of one process are as
telling as counters, and a counter that starts anew with its process is one that scrapers know.
"""

from collections.abc import Mapping
from http import HTTPMethod

from prometheus_client import REGISTRY, generate_latest
from starlette.responses import Response

from frontend.asgi import App, Arrival
from frontend.http.operator.exposition import TEXT_FORMAT, Joined, read_page
from frontend.processes import Siblings

TOPIC = "metrics"


class MergedMetrics:
    """Answers ``/metrics`` for all processes."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings
        siblings.tell(TOPIC, lambda _: own_metrics())

    async def __call__(self, arrival: Arrival) -> App | None:
        """Return the page, if that is asked for."""
        asked = arrival.path.rstrip("/") == "/metrics"
        if not asked or arrival.scope["method"] != HTTPMethod.GET:
            return None
        pages = {self._siblings.name: own_metrics()}
        pages.update(await self._siblings.ask(TOPIC))
        return Response(await merge(pages), media_type=TEXT_FORMAT)


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
