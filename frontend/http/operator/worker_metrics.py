"""``/mmrouter/workers/metrics``: the metrics of every worker's own process, vLLM's among them, on
one page, each sample with its worker. Workers serve no HTTP.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from fastapi import APIRouter
from starlette.responses import StreamingResponse

from common.observability.telemetry import WORKER_PAGES_MISSING
from frontend.http.operator.exposition import ExpositionError, Joined, PageReader
from frontend.http.operator.merged_metrics import TEXT_FORMAT
from frontend.workers import Roll, WorkerPage, ask_for_pages

logger = logging.getLogger(__name__)

_LINES: Final = 100
"""Read at a time: about half a millisecond."""

_PAUSE_S: Final = 0.001
"""Then others have the event loop. A thread would keep the interpreter from them for longer."""


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
        async with reading:
            await _read(page, joined)

    await ask_for_pages(members, take)
    return joined


async def _read(page: WorkerPage, into: Joined) -> None:
    reader = PageReader(page.text, "worker_id", page.worker_id)
    try:
        while reader.read(_LINES):  # noqa: ASYNC110  # it is work, and no condition
            await asyncio.sleep(_PAUSE_S)
    except ExpositionError as error:
        WORKER_PAGES_MISSING.labels("malformed").inc()
        logger.warning("the metrics of worker %s are left out: %s", page.worker_id, error)
        return
    into.add(reader.families)


async def _pieces(joined: Joined) -> AsyncIterator[bytes]:
    for piece in joined:
        yield piece
        await asyncio.sleep(0)
