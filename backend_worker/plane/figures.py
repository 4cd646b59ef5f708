"""This worker's own metrics, as frontends ask for them: vLLM's of its engine, and ours."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from backend_worker.plane.session import Session
from common.request_plane.protocol import MOST_FIGURES_BYTES, Figures

FRESH_S: Final = 1.0
"""A page that is not older is given to whoever asks: making one takes milliseconds."""


Send = Callable[[Session, Figures], Awaitable[None]]


class OwnFigures:
    """The page, made in a thread, and at most once in :data:`FRESH_S` for all frontends."""

    def __init__(self, send: Send, registry: CollectorRegistry = REGISTRY) -> None:
        """
        Args:
            send: tells a frontend, after waiting for room.
        """
        self._send = send
        self._registry = registry
        self._page = b""
        self._made = float("-inf")
        self._making = asyncio.Lock()

    async def tell(self, session: Session, number: int) -> None:
        """Answer a frontend's question of that number, unless it is being told already."""
        if session.telling:
            return
        session.telling = True
        try:
            await self._send(session, Figures(number, await self.page()))
        finally:
            session.telling = False

    async def page(self) -> bytes:
        """In Prometheus's text format; empty if it is larger than a frontend takes."""
        async with self._making:
            if time.monotonic() - self._made > FRESH_S:
                page = await asyncio.to_thread(generate_latest, self._registry)
                self._page = page if len(page) <= MOST_FIGURES_BYTES else b""
                self._made = time.monotonic()
            return self._page
