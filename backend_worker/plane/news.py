"""Load reports: how busy a worker is, and when each frontend is told."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from backend_worker.engine.vllm_engine import RankLoad
from backend_worker.plane.ledger import Ledger
from backend_worker.plane.operations import Operations
from backend_worker.plane.request import ServingEngine
from backend_worker.plane.session import Session
from common.request_plane.protocol import (
    LONGEST_MM_HASH,
    MOST_NEW_MEDIA,
    Coming,
    HeldAdapter,
    RankStatus,
    Status,
    Submit,
)

NEWS_PAUSE_S = 0.005
"""How long nobody is told more of others' load, for each frontend that was told: so that this
costs a worker the same with two frontends and with forty. The first change is told at once."""

STEPS_PAUSE_S = 1.9
"""How long a frontend is not told again what steps add up to."""

_NO_LOAD: Final = RankLoad()


class News:
    """What others have, for each frontend.

    Attributes:
        ledger: what each frontend has.
    """

    def __init__(
        self,
        engine: ServingEngine,
        operations: Operations,
    ) -> None:
        self._engine = engine
        self._operations = operations
        self._changed = asyncio.Event()
        self.ledger = Ledger(engine.ranks, self._changed.set)

    def status(self, session: Session) -> Status:
        """How busy the worker is, for the frontend of this session, and what others sent
        since it was asked last.
        """
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
                for rank in self.ledger.ranks
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
        """What a frontend was not told yet: all that there are, and those that are active."""
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
        """Note for other frontends what a request brings to its rank, if it brings anything:
        so much of it that none can burden the others with more.
        """
        told = (one.mm_hash for one in submit.media if len(one.mm_hash) <= LONGEST_MM_HASH)
        media = list(dict.fromkeys(itertools.islice(told, MOST_NEW_MEDIA)))
        if not submit.new_blocks and not media:
            return
        coming = Coming(rank, submit.new_blocks, media)
        for other in others:
            other.coming.append(coming)

    async def tell(self, listeners: Callable[[], Iterable[Callable[[], Awaitable[None]]]]) -> None:
        """Tell each frontend when what others have here has changed, until cancelled.

        Args:
            listeners: for each frontend that has news, what tells it; must not wait for it.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            # Not for every single change of a burst.
            await asyncio.sleep(0)
            telling = list(listeners())
            for tell in telling:
                await tell()
            await asyncio.sleep(NEWS_PAUSE_S * len(telling))
