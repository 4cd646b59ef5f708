"""``/mmrouter/workers/metrics``: the metrics of every worker's own process, vLLM's among them, on
one page, each sample with its worker. Workers serve no HTTP.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.responses import StreamingResponse

from common.observability.telemetry import WORKER_PAGES_MISSING
from frontend.http.operator.exposition import TEXT_FORMAT, ExpositionError, Joined, read_page
from frontend.workers import Roll, WorkerPage, ask_for_pages

logger = logging.getLogger(__name__)


def worker_metrics_routes(members: Roll) -> APIRouter:
    """The route. One page is made at a time, whoever asks."""
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
