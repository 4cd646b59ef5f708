"""Loads an adapter for a request that no worker which has it can take.

A worker is asked only if it says that it does so, only for what others of its fleet have, and only
for files on its host: clients name no files, and nothing is downloaded for them. Where a load was
not done it is not asked for again for a while.
"""

import asyncio
import logging
import time
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from vllm.lora.request import LoRARequest

from common.identity import Incarnation, WorkerId
from common.observability.telemetry import ADAPTERS_LOADED
from common.request_plane.card import Adapter
from common.request_plane.operations import LoadLoraAdapter, Outcome
from frontend.router import LoraKey, Router
from frontend.workers.adapters import key_of
from frontend.workers.members import Member, Members
from frontend.workers.operations import perform
from frontend.workers.serving import Serving

logger = logging.getLogger(__name__)

LOADING_S: Final = 60.0
"""How long a worker may take to load one."""

AGAIN_S: Final = 30.0
"""After so long a worker that has not loaded an adapter is asked for it again."""

HUNG_S: Final = 600.0
"""So long nobody is asked for an adapter that a worker was not done with in time: its files may be
where reading them takes for ever, and the engine computes nothing meanwhile."""


class _Load(NamedTuple):
    """One that a worker was asked for."""

    key: LoraKey
    task: asyncio.Task[None]


class AdapterLoading:
    """Of the workers of a model, each of which is asked for one adapter at a time."""

    def __init__(self, members: Members, router: Router, serving: Serving) -> None:
        self._members = members
        self._router = router
        self._serving = serving
        self._loads: dict[WorkerId, _Load] = {}
        self._not_done: dict[tuple[WorkerId, Incarnation, LoraKey], float] = {}
        self._hung: dict[LoraKey, float] = {}
        self._closed = False

    async def load(self, adapter: LoRARequest, exclude: Collection[WorkerId]) -> bool:
        """Have a worker load an adapter, once for all requests that wait for it. A load goes on
        when nobody waits for it any more.

        Args:
            exclude: workers not to ask.

        Returns:
            Whether a worker was asked, so that it is worth while to route again. If not, there is
            none that may be asked now, which takes no time to find out.
        """
        key = LoraKey(adapter.lora_name, adapter.lora_path)
        load = self._under_way(key, exclude) or self._start(key, adapter, exclude)
        if load is None:
            return False
        await asyncio.wait([load.task])
        if not load.task.cancelled():
            load.task.result()  # a mistake of ours
        return True

    def _under_way(self, key: LoraKey, exclude: Collection[WorkerId]) -> _Load | None:
        loads = self._loads.items()
        return next(
            (one for worker_id, one in loads if one.key == key and worker_id not in exclude), None
        )

    def _start(
        self, key: LoraKey, adapter: LoRARequest, exclude: Collection[WorkerId]
    ) -> _Load | None:
        if self._closed or self._hung.get(key, 0.0) > time.monotonic():
            return None
        if not (PurePosixPath(key.path).is_absolute() and self._serving.adapters.has(key)):
            return None
        unfit = [*exclude, *self._loads, *self._not_done_at(key)]
        worker_id = self._router.where_to_load(key, unfit)
        member = None if worker_id is None else self._members.holder(worker_id)
        if worker_id is None or member is None:
            return None
        told = Adapter(
            name=key.name,
            path=key.path,
            base_model_name=adapter.base_model_name,
            is_3d_lora_weight=adapter.is_3d_lora_weight,
        )
        task = asyncio.create_task(self._load_at(member, told), name="adapter")
        load = self._loads[worker_id] = _Load(key, task)
        task.add_done_callback(lambda _: self._loads.pop(worker_id))
        return load

    async def _load_at(self, member: Member, adapter: Adapter) -> None:
        operation = LoadLoraAdapter(
            adapter.name,
            adapter.path,
            is_3d_lora_weight=adapter.is_3d_lora_weight,
            base_model_name=adapter.base_model_name,
            for_request=True,
        )
        said, key = member.adapters, key_of(adapter)
        self._hold(member, key)  # until it is done, whatever becomes of this
        (done,) = await perform([member], operation, LOADING_S)
        ADAPTERS_LOADED.labels(done.outcome.value).inc()
        if done.outcome is not Outcome.DONE:
            why = (done.worker_id, adapter.name, done.message)
            logger.warning("worker %s has not loaded adapter %s for a request: %s", *why)
            self._hold(member, key)
            if done.seconds >= LOADING_S:
                self._hung[key] = time.monotonic() + HUNG_S
            return
        self._not_done.pop((done.worker_id, done.incarnation, key), None)
        if member.adapters is said:  # else it has said meanwhile what it has, which is newer
            self._serving.loaded(member, adapter)
        logger.info("worker %s has loaded adapter %s for a request", done.worker_id, adapter.name)

    def _hold(self, member: Member, key: LoraKey) -> None:
        """Ask a run of a worker no more for an adapter, for a while."""
        now = time.monotonic()
        self._not_done = {one: until for one, until in self._not_done.items() if until > now}
        self._hung = {one: until for one, until in self._hung.items() if until > now}
        self._not_done[member.card.worker_id, member.card.incarnation, key] = now + AGAIN_S

    def _not_done_at(self, key: LoraKey) -> list[WorkerId]:
        """Workers whose present run was asked a short while ago, and has not loaded it."""
        now, holders = time.monotonic(), self._members.holder
        return [
            worker_id
            for (worker_id, incarnation, one), until in self._not_done.items()
            if one == key
            and until > now
            and (holder := holders(worker_id)) is not None
            and holder.card.incarnation == incarnation
        ]

    async def close(self) -> None:
        """Ask for nothing any more."""
        self._closed = True
        tasks = [load.task for load in self._loads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
