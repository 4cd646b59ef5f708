"""Blocks that a target should hold because a prompt was sent there.

Predictions replace the KV events of a worker that sends none. With events they bridge the time
until these arrive, so that two identical prompts arriving together go to the same worker.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from common.identity import BlockHash, RequestId, Target
from frontend.router.index.kv_index import KvIndex
from frontend.router.index.target_bits import TargetBits, bits
from frontend.router.index.windows import WindowIndex

MAX_BLOCKS: Final = 2_000_000
"""Over all workers: two minutes of 500 prompts a second with 32 blocks each."""

PREDICT_TTL_S: Final = 5.0
"""Lifetime of a prediction where events come: an engine publishes them when it has prefilled the
prompt, after seconds if that is long."""

APPROXIMATE_TTL_S: Final = 120.0
"""Lifetime of a prediction where no events come: caches of busy engines turn over in minutes."""

_EXPIRED_PER_PREDICTED = 8
"""Old requests expired with every new one: more than one, so that expiry outpaces additions."""


class _Prediction(NamedTuple):
    target: Target
    epoch: int
    slots: int
    hashes: Sequence[BlockHash]
    tails: Mapping[int, Sequence[BlockHash]]
    expires: float


class Predictions:
    """Predicted blocks, forgotten after a lifetime, at a request's end, or for lack of room.
    ``blocks`` counts each once per request.
    """

    def __init__(self, slots: TargetBits, max_blocks: int = MAX_BLOCKS) -> None:
        self.index = KvIndex(slots)
        self.windows = WindowIndex()
        self._slots = slots
        self._max_blocks = max_blocks
        self.blocks = 0
        # By lifetime, so that within each the oldest entry is the first to expire.
        self._ledgers: dict[float, OrderedDict[RequestId, _Prediction]] = {}
        self._lifetimes: dict[RequestId, float] = {}

    def predict(
        self,
        request_id: RequestId,
        target: Target,
        hashes: Sequence[BlockHash],
        lifetime_s: float,
        now: float,
        tails: Mapping[int, Sequence[BlockHash]] = MappingProxyType({}),
    ) -> None:
        """Expect a prompt's blocks on a target, for ``lifetime_s`` seconds at least. Keeps both
        collections, which must not change. ``tails`` has the blocks of each windowed group.
        """
        self.forget(request_id)
        self.expire(now, _EXPIRED_PER_PREDICTED)
        blocks = _count(hashes, tails)
        if not blocks or target not in self._slots or blocks > self._max_blocks:
            return
        while self.blocks + blocks > self._max_blocks:
            self._drop_oldest()
        slots = self._slots.mask(target)
        for slot in bits(slots):
            self.index.store_slot(slot, hashes)
        for group, tail in tails.items():
            self.windows.store(target, tail, group, 1)
        ledger = self._ledgers.setdefault(lifetime_s, OrderedDict())
        epoch = self._slots.epoch(target)
        ledger[request_id] = _Prediction(target, epoch, slots, hashes, tails, now + lifetime_s)
        self._lifetimes[request_id] = lifetime_s
        self.blocks += blocks

    def __len__(self) -> int:
        return len(self._lifetimes)

    def of(self, request_id: RequestId) -> Sequence[BlockHash]:
        lifetime_s = self._lifetimes.get(request_id)
        return () if lifetime_s is None else self._ledgers[lifetime_s][request_id].hashes

    def forget(self, request_id: RequestId) -> None:
        """Withdraw the prediction of a request. Unknown ids are ignored."""
        lifetime_s = self._lifetimes.pop(request_id, None)
        if lifetime_s is None:
            return
        prediction = self._ledgers[lifetime_s].pop(request_id)
        self.blocks -= _count(prediction.hashes, prediction.tails)
        # Slots retired since then took these predictions with them.
        if self._slots.epoch(prediction.target) == prediction.epoch:
            for slot in bits(prediction.slots):
                self.index.remove_slot(slot, prediction.hashes)
            for group, tail in prediction.tails.items():
                self.windows.remove(prediction.target, tail, group)

    def evicted(self, target: Target, hashes: Sequence[BlockHash]) -> None:
        """Note that a target dropped blocks, of any request."""
        for slot in bits(self._slots.mask(target)):
            self.index.remove_slot(slot, hashes, all_copies=True)

    def expire(self, now: float, limit: int) -> bool:
        """Expire at most ``limit`` requests, since each takes a moment.
        Return if more may be left.
        """
        for ledger in self._ledgers.values():
            while ledger:
                request_id, oldest = next(iter(ledger.items()))
                if oldest.expires > now:
                    break
                if not limit:
                    return True
                limit -= 1
                self.forget(request_id)
        return not limit

    def _drop_oldest(self) -> None:
        ledgers = [ledger for ledger in self._ledgers.values() if ledger]
        ledger = min(ledgers, key=lambda one: next(iter(one.values())).expires)
        self.forget(next(iter(ledger)))


def _count(hashes: Sequence[BlockHash], tails: Mapping[int, Sequence[BlockHash]]) -> int:
    return len(hashes) + sum(map(len, tails.values()))
