"""The LoRA adapters that workers serve, as vLLM's server looks them up: by name.

Workers may have different ones. If two mean other files by one name, the one that came first counts
until its last worker has left.
"""

import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Final

from vllm.lora.request import LoRARequest

from common.identity import WorkerId
from common.lru import Lru
from common.request_plane.card import Adapter, WorkerCard
from frontend.router import LoraKey

logger = logging.getLogger(__name__)

LOST_S: Final = 300.0
"""So long requests that lost their worker can have its adapters loaded elsewhere."""

MOST_LOST: Final = 1024
"""Adapters that are remembered for that."""

CONFLICT: Final = "adapter %s is at %s on worker %s, which gets no requests for it: others have %s"


def key_of(adapter: Adapter) -> LoraKey:
    """What of an adapter enters block hashes."""
    return LoraKey(adapter.name, adapter.path)


class Adapters:
    """Those of the workers that serve.

    Attributes:
        requests: what vLLM's server attaches to a request for an adapter, by the adapter's name.
            It is changed in place, since vLLM's server keeps it.
    """

    def __init__(self) -> None:
        self.requests: dict[str, LoRARequest] = {}
        self._of: dict[WorkerId, Sequence[Adapter]] = {}
        self._offers: dict[str, dict[Adapter, int]] = {}
        self._lost: Lru[LoraKey, float] = Lru(MOST_LOST)
        self._reserved: frozenset[str] = frozenset()
        self._ids = itertools.count(1)

    def reserve(self, names: Iterable[str]) -> None:
        """Names that no adapter may have: those of the model."""
        self._reserved = frozenset(names)
        for name in self._reserved:
            self.requests.pop(name, None)

    def joined(self, card: WorkerCard) -> None:
        """A worker serves."""
        self.changed(card.worker_id, card.adapters)

    def changed(self, worker_id: WorkerId, adapters: Sequence[Adapter]) -> None:
        """A worker that serves has these now, and no others."""
        for adapter in {*self._of.get(worker_id, ())} - {*adapters}:
            self._lost.pop(key_of(adapter))  # it was let go
        self._forget(worker_id)
        self._of[worker_id] = adapters
        for adapter in adapters:
            offers = self._offers.setdefault(adapter.name, {})
            offers[adapter] = offers.get(adapter, 0) + 1
            self._choose(adapter.name)
            chosen = self.requests.get(adapter.name)
            if chosen is not None and chosen.lora_path != adapter.path:
                place = (adapter.path, worker_id, chosen.lora_path)
                logger.warning(CONFLICT, adapter.name, *place)

    def left(self, worker_id: WorkerId) -> None:
        """A worker does not serve any longer. Others are ignored."""
        until = time.monotonic() + LOST_S
        for adapter in self._of.get(worker_id, ()):
            self._lost.put(key_of(adapter), until)
        self._forget(worker_id)

    def has(self, key: LoraKey) -> bool:
        """Whether some worker has an adapter, or had it when it left a short while ago."""
        return any(one.path == key.path for one in self._offers.get(key.name, ())) or (
            (self._lost.peek(key) or 0.0) > time.monotonic()
        )

    def _forget(self, worker_id: WorkerId) -> None:
        for adapter in self._of.pop(worker_id, ()):
            offers = self._offers[adapter.name]
            offers[adapter] -= 1
            if not offers[adapter]:
                del offers[adapter]
            self._choose(adapter.name)

    def _choose(self, name: str) -> None:
        """Which files a name stands for."""
        offers = self._offers[name]
        if not offers:
            del self._offers[name]
            self.requests.pop(name, None)
            return
        chosen = self.requests.get(name)
        if name in self._reserved or (
            chosen is not None and any(one.path == chosen.lora_path for one in offers)
        ):
            return
        first = next(iter(offers))
        self.requests[name] = LoRARequest(
            lora_name=name,
            lora_int_id=next(self._ids),  # workers have numbers of their own
            lora_path=first.path,
            base_model_name=first.base_model_name,
            is_3d_lora_weight=first.is_3d_lora_weight,
        )
