"""LoRA adapters of workers, looked up by name as vLLM's server does.

If two workers have different files under one name, the first counts until its last worker has left.
"""

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from vllm.lora.request import LoRARequest

from common.identity import WorkerId
from common.request_plane.card import Adapter
from frontend.router import LoraKey

logger = logging.getLogger(__name__)

CONFLICT: Final = (
    "adapter %s is at %s on worker %s, which gets no requests for it: others have %s; %d adapters "
    "of this worker have other paths in all"
)

MAX_NAMES: Final = 4096
"""Names of adapters of a model; one worker has 1,024 at most. Each listing of the models takes the
event loop 60 µs for each."""


def key_of(adapter: Adapter) -> LoraKey:
    return LoraKey(adapter.name, adapter.path)


class Adapters:
    """Adapters of serving workers; ``requests`` is changed in place, since
    vLLM's server keeps it.
    """

    def __init__(self) -> None:
        self.requests: dict[str, LoRARequest] = {}
        self._of: dict[WorkerId, Sequence[Adapter]] = {}
        self._offers: dict[str, dict[Adapter, int]] = {}
        self._reserved: frozenset[str] = frozenset()
        self._ids = itertools.count(1)

    def reserve(self, names: Iterable[str]) -> None:
        """Reserve the model's names: no adapter gets them."""
        self._reserved = frozenset(names)
        for name in self._reserved:
            self.requests.pop(name, None)

    def changed(self, worker_id: WorkerId, adapters: Sequence[Adapter]) -> None:
        """Replace the adapters of a serving worker."""
        self._forget(worker_id)
        self._of[worker_id] = adapters
        conflicts: list[tuple[str, str, WorkerId, str]] = []
        for adapter in adapters:
            offers = self._offers.setdefault(adapter.name, {})
            offers[adapter] = offers.get(adapter, 0) + 1
            self._choose(adapter.name)
            chosen = self.requests.get(adapter.name)
            if chosen is not None and chosen.lora_path != adapter.path:
                conflicts.append((adapter.name, adapter.path, worker_id, chosen.lora_path))
        if conflicts:  # one line: a worker may report other paths again and again
            logger.warning(CONFLICT, *conflicts[0], len(conflicts))
        left_out = sum(each.name not in self.requests for each in adapters)
        if left_out and len(self.requests) >= MAX_NAMES:
            logger.warning(
                "%d adapters of worker %s are not served: the model has %d adapters already",
                left_out,
                worker_id,
                MAX_NAMES,
            )

    def left(self, worker_id: WorkerId) -> None:
        self._forget(worker_id)

    def _forget(self, worker_id: WorkerId) -> None:
        for adapter in self._of.pop(worker_id, ()):
            offers = self._offers[adapter.name]
            offers[adapter] -= 1
            if not offers[adapter]:
                del offers[adapter]
            self._choose(adapter.name)

    def _choose(self, name: str) -> None:
        """Decide which files a name stands for."""
        offers = self._offers[name]
        if not offers:
            del self._offers[name]
            self.requests.pop(name, None)
            return
        chosen = self.requests.get(name)
        if name in self._reserved or (
            len(self.requests) >= MAX_NAMES
            if chosen is None
            else any(one.path == chosen.lora_path for one in offers)
        ):
            return
        first = next(iter(offers))
        self.requests[name] = LoRARequest(
            lora_name=name,
            lora_int_id=next(self._ids),  # workers use their own numbers
            lora_path=first.path,
            base_model_name=first.base_model_name,
            is_3d_lora_weight=first.is_3d_lora_weight,
        )
