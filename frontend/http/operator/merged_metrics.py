"""Metrics of several processes on one page: of a frontend's own (``/metrics``), each sample with
its process, and of all workers (``/mmrouter/workers/metrics``), which serve no HTTP themselves.

Sums are left to whoever reads them (``sum without (process)``): gauges of one process are as
telling as counters, and a counter that starts anew with its process is one that scrapers know.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from http import HTTPMethod

from fastapi import APIRouter
from prometheus_client import REGISTRY, generate_latest
from starlette.responses import Response, StreamingResponse

from common.observability.telemetry import WORKER_PAGES_MISSING
from frontend.asgi import App, Arrival
from frontend.http.operator.exposition import TEXT_FORMAT, ExpositionError, Joined, read_page
from frontend.processes import Siblings
from frontend.workers import Roll, WorkerPage, ask_for_pages

logger = logging.getLogger(__name__)

TOPIC = "metrics"


class MergedMetrics:
    """Answers ``/metrics`` for all processes of this frontend."""

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
    """Return one page from those of processes, as ``prometheus_client`` writes them."""
    joined = Joined()
    for process, page in sorted(pages.items()):
        await read_page(page, "process", process, joined)
    return b"".join(joined)


def worker_metrics_routes(members: Roll) -> APIRouter:
    """Serve the metrics of all workers; one page is made at a time, whoever asks."""
    api = APIRouter(prefix="/mmrouter", tags=["mmrouter"])
    turn = asyncio.Lock()

    @api.get("/workers/metrics")
    async def metrics() -> StreamingResponse:
        """The metrics of every worker's own process, each sample with its worker."""
        async with turn:
            joined = await joined_pages(members)
        return StreamingResponse(_pieces(joined), media_type=TEXT_FORMAT)

    return api


async def joined_pages(members: Roll) -> Joined:
    """One page of those of all workers that serve; what is no page is counted and left out."""
    joined = Joined()
    reading = asyncio.Lock()

    async def take(page: WorkerPage) -> None:
        try:
            async with reading:
                await read_page(page.text, "worker_id", page.worker_id, joined)
        except ExpositionError as error:
            WORKER_PAGES_MISSING.labels("malformed").inc()
            logger.warning("the metrics of worker %s are left out: %s", page.worker_id, error)

    await ask_for_pages(members, take)
    return joined


async def _pieces(joined: Joined) -> AsyncIterator[bytes]:
    for piece in joined:
        yield piece
        await asyncio.sleep(0)
