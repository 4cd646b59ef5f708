"""Merge the metrics of several processes: a frontend's own (``/metrics``), and those of all workers
(``/mmrouter/workers/metrics``), which serve no HTTP.

Each sample is labelled with its process or worker. Scrapers add up (``sum without (process)``): the
gauges of one process are useful too, and scrapers know counters that restart with it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPMethod
from typing import Final

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

PAUSE_S: Final = 0.05
"""Seconds from one page to the next, for those who ask meanwhile."""


class SharedPage:
    """A page that is made once for all who wait for it, and is no older than any of them.

    ``/metrics`` takes 10 ms, and nobody needs a key. vLLM's route makes it in 40 threads, and the
    event loop waits for their lock: 300 connections kept chats waiting for as long as they asked.
    """

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._turn = asyncio.Lock()
        self._page = b""
        self._begun = self._made = 0  # pages, counted from 1

    async def read(self) -> Response:
        before = self._begun
        async with self._turn:
            if self._made <= before:
                await asyncio.sleep(PAUSE_S)
                self._begun = number = self._begun + 1
                self._page, self._made = await self._make(), number
            return Response(self._page, media_type=TEXT_FORMAT)


class MergedMetrics:
    """Answer ``/metrics`` for all processes of this frontend."""

    def __init__(self, siblings: Siblings | None) -> None:
        self._siblings = siblings
        self._page = SharedPage(self._merged)
        if siblings is not None:
            siblings.tell(TOPIC, lambda _: own_metrics())

    async def __call__(self, arrival: Arrival) -> App | None:
        """Return the page on ``GET /metrics``, or its head."""
        asked = arrival.path.rstrip("/") == "/metrics"
        if not asked or arrival.scope["method"] not in (HTTPMethod.GET, HTTPMethod.HEAD):
            return None
        return await self._page.read()

    async def _merged(self) -> bytes:
        if self._siblings is None:
            return own_metrics()
        pages = {self._siblings.name: own_metrics()}
        pages.update(await self._siblings.ask(TOPIC))
        return await merge(pages)


def own_metrics() -> bytes:
    """Return the page of this process, in Prometheus's text format."""
    return generate_latest(REGISTRY)


async def merge(pages: Mapping[str, bytes]) -> bytes:
    """Merge the pages of processes, as ``prometheus_client`` writes them."""
    joined = Joined()
    for process, page in sorted(pages.items()):
        await read_page(page, "process", process, joined)
    return b"".join(joined)


def worker_metrics_routes(members: Roll) -> APIRouter:
    """Serve the metrics of all workers, building one page at a time."""
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
    """Merge the pages of all serving workers. Malformed pages are counted and left out."""
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
