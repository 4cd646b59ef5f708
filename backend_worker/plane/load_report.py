"""Load reports and metrics that a worker sends to frontends."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from backend_worker.engine.vllm_engine import RankLoad
from backend_worker.plane.frontend_loads import FrontendLoads
from backend_worker.plane.operations import Operations
from backend_worker.plane.request import ServingEngine
from backend_worker.plane.session import Session
from common.request_plane.protocol import (
    MAX_FIGURES_BYTES,
    MAX_MM_HASH_LEN,
    MAX_NEW_MEDIA,
    Coming,
    Figures,
    HeldAdapter,
    Status,
    Submit,
)
from common.request_plane.step_sums import RankStatus

REPORT_PAUSE_S = 0.005
"""Pause between load reports to other frontends, for each frontend told: so that this
costs a worker the same with two frontends and with forty. The first change is told at once."""

STEPS_PAUSE_S = 1.9  # minimum interval between reports of step sums to a frontend

_NO_LOAD: Final = RankLoad()


class LoadReports:
    """For each frontend, the load of the other frontends."""

    def __init__(
        self,
        engine: ServingEngine,
        operations: Operations,
    ) -> None:
        self._engine = engine
        self._operations = operations
        self._changed = asyncio.Event()
        self.loads = FrontendLoads(engine.ranks, self._changed.set)

    def status(self, session: Session) -> Status:
        """Return the worker's load, and other frontends' requests since the last report."""
        session.account.told()
        coming = list(session.coming)
        session.coming.clear()
        loads, others = self._engine.load(), session.account.others()
        operations = self._operations
        steps = []
        if (now := time.monotonic()) - session.steps_told >= STEPS_PAUSE_S:
            session.steps_told = now
            steps = self._engine.steps()
        adapters, active = self._adapters(session)
        return Status(
            [
                RankStatus(rank, load.running, load.waiting, load.kv_usage, *others[rank])
                for rank in self.loads.ranks
                for load in (loads.get(rank, _NO_LOAD),)
            ],
            self._engine.hf_processor_runs,
            coming,
            operations.state.condition,
            operations.blocks_emptied,
            operations.media_emptied,
            operations.stands_still,
            steps,
            adapters,
            active,
        )

    def _adapters(self, session: Session) -> tuple[list[HeldAdapter] | None, list[str] | None]:
        """Return what a frontend was not sent yet: all adapters, and the active ones."""
        ours = self._engine.adapters
        held, active = None, None
        if session.adapters_told != ours.changes:
            session.adapters_told = ours.changes
            held = [HeldAdapter(**each.model_dump()) for each in ours.known]
        if session.active_told != ours.active:
            session.active_told = ours.active
            active = list(ours.active)
        return held, active

    @staticmethod
    def spread(submit: Submit, rank: int, others: Iterable[Session]) -> None:
        """Queue a request's new blocks and media for other frontends, up to a limit."""
        told = (one.mm_hash for one in submit.media if len(one.mm_hash) <= MAX_MM_HASH_LEN)
        media = list(dict.fromkeys(itertools.islice(told, MAX_NEW_MEDIA)))
        if not submit.new_blocks and not media:
            return
        coming = Coming(rank, submit.new_blocks, media)
        for other in others:
            other.coming.append(coming)

    async def tell(self, listeners: Callable[[], Iterable[Callable[[], Awaitable[None]]]]) -> None:
        """Report changed loads to each frontend, until cancelled. Listeners must not wait."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            # Coalesces a burst of changes.
            await asyncio.sleep(0)
            telling = list(listeners())
            for tell in telling:
                await tell()
            await asyncio.sleep(REPORT_PAUSE_S * len(telling))


FRESH_S: Final = 1.0
"""Maximum age, in seconds, of a cached page: rendering one takes milliseconds."""

Send = Callable[[Session, Figures], Awaitable[None]]


class OwnMetrics:
    """Metrics page, made in a thread at most once in :data:`FRESH_S` for all frontends."""

    def __init__(self, send: Send, registry: CollectorRegistry = REGISTRY) -> None:
        """Take the function that sends to a frontend, after waiting for room."""
        self._send = send
        self._registry = registry
        self._page = b""
        self._made = float("-inf")
        self._making = asyncio.Lock()

    async def tell(self, session: Session, number: int) -> None:
        """Answer a frontend's metrics request, unless one is being answered already."""
        if session.telling:
            return
        session.telling = True
        try:
            await self._send(session, Figures(number, await self.page()))
        finally:
            session.telling = False

    async def page(self) -> bytes:
        """Return Prometheus's text format; empty if it is larger than a frontend accepts."""
        async with self._making:
            if time.monotonic() - self._made > FRESH_S:
                page = await asyncio.to_thread(generate_latest, self._registry)
                self._page = page if len(page) <= MAX_FIGURES_BYTES else b""
                self._made = time.monotonic()
            return self._page
