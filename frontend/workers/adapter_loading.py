"""Loads an adapter for a request that no worker which has it can take.

A worker is asked only if it says that it does so, and if others of its fleet have the adapter: a
client names no files. What failed somewhere is not tried there again for a while.
"""

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Final

from vllm.lora.request import LoRARequest

from common.card import Adapter
from common.identity import Incarnation, WorkerId
from common.operations import LoadLoraAdapter, Outcome
from common.single_flight import SingleFlight
from common.telemetry import ADAPTERS_LOADED
from frontend.router import LoraKey, Router
from frontend.workers.members import Member, Members
from frontend.workers.operations import perform
from frontend.workers.serving import Serving

logger = logging.getLogger(__name__)

LOADING_S: Final = 60.0
"""How long a worker may take to load one."""

MOST_WANTED: Final = 16
"""Adapters that are being loaded or wait for it. Requests for more of them don't wait."""

MOST_TRIED: Final = 3
"""Workers that are asked for one, until one has loaded it."""

AGAIN_S: Final = 60.0
"""After so long a worker that could not load an adapter is asked for it again."""

REFUSED_S: Final = 2.0
"""The same of one that did not try, since it was doing something else, say."""


class AdapterLoading:
    """Of the workers of a model."""

    def __init__(self, members: Members, router: Router, serving: Serving) -> None:
        self._members = members
        self._router = router
        self._serving = serving
        self._under_way: SingleFlight[bool] = SingleFlight()
        self._turn = asyncio.Lock()  # a worker does one thing at a time, and refuses others
        self._failed: dict[tuple[WorkerId, Incarnation, LoraKey], float] = {}

    async def load(self, adapter: LoRARequest, exclude: Collection[WorkerId]) -> bool:
        """Have a worker load an adapter, once for all requests that wait for it.

        Args:
            exclude: workers not to ask.

        Returns:
            Whether one more worker has it now. If not, there is none that may, or that can.
        """
        key = LoraKey(adapter.lora_name, adapter.lora_path)
        if key not in self._under_way and len(self._under_way) >= MOST_WANTED:
            return False
        loaded, _ = await self._under_way.run(key, lambda: self._load(key, adapter, exclude))
        return loaded

    async def _load(
        self, key: LoraKey, adapter: LoRARequest, exclude: Collection[WorkerId]
    ) -> bool:
        async with self._turn:
            for _ in range(MOST_TRIED):
                worker_id = self._router.where_to_load(key, [*exclude, *self._failed_at(key)])
                member = None if worker_id is None else self._members.holder(worker_id)
                if member is None:
                    return False
                if await self._load_at(member, key, adapter):
                    return True
        return False

    async def _load_at(self, member: Member, key: LoraKey, adapter: LoRARequest) -> bool:
        operation = LoadLoraAdapter(
            key.name, key.path, is_3d_lora_weight=adapter.is_3d_lora_weight, for_request=True
        )
        (done,) = await perform([member], operation, LOADING_S)
        ADAPTERS_LOADED.labels(done.outcome.value).inc()
        if done.outcome is Outcome.DONE:
            told = Adapter(
                name=key.name,
                path=key.path,
                base_model_name=adapter.base_model_name,
                is_3d_lora_weight=adapter.is_3d_lora_weight,
            )
            self._serving.loaded(member, told)
            logger.info("worker %s has loaded adapter %s for a request", done.worker_id, key.name)
            return True
        why = (done.worker_id, key.name, done.message)
        logger.warning("worker %s has not loaded adapter %s for a request: %s", *why)
        pause = REFUSED_S if done.outcome is Outcome.REFUSED else AGAIN_S
        self._failed[done.worker_id, done.incarnation, key] = time.monotonic() + pause
        return False

    def _failed_at(self, key: LoraKey) -> list[WorkerId]:
        """Workers whose present run could not load it a short while ago."""
        now = time.monotonic()
        self._failed = {one: until for one, until in self._failed.items() if until > now}
        holders = self._members.holder
        return [
            worker_id
            for worker_id, incarnation, failed in self._failed
            if failed == key
            and (holder := holders(worker_id)) is not None
            and holder.card.incarnation == incarnation
        ]
