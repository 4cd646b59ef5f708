"""Load of each target in tokens, and which targets are busy.

Requests of this frontend are known at once and exactly. Workers report those of other frontends: a
report counts until the next one, or until it expires.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from common.identity import RequestId, Target, WorkerId
from common.request_plane.step_sums import RankStatus


class TargetLoad(NamedTuple):
    """Load of one target, requests of other frontends included.

    Attributes:
        active: requests sent and not finished, each choice as one, like in the engine.
        waiting: requests in the worker's queue: as many as it last reported, and at least those
            beyond its slots.
        prefill_tokens: prompt tokens still to compute, cached ones left out.
        decode_tokens: tokens in the contexts of decoding requests.
    """

    active: int
    waiting: int
    prefill_tokens: int
    decode_tokens: int


class Slots(NamedTuple):
    """Room in all engines.

    Attributes:
        total: requests that run at once, by ``max_num_seqs``.
        largest: those of the target that has most.
        others: those of other frontends, as last reported.
        tokens: prompt tokens in flight with which all targets are busy.
        busy: whether all targets are.
    """

    total: int
    largest: int
    others: int
    tokens: int
    busy: bool = False


class BusyThresholds(NamedTuple):
    """Limits of a busy target: share of its KV cache, tokens waiting for prefill (0 for none)."""

    blocks_fraction: float = 1.0
    prefill_tokens: int = 0


@dataclass(slots=True)
class _Own:
    active: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(slots=True)
class _Request:
    target: Target
    prefill_tokens: int
    prompt_tokens: int
    choices: int
    decoding: bool = False


_NO_REPORT = RankStatus(0, 0, 0, 0.0, 0, 0, 0)
_NOTHING = _Own()
_NEVER_BUSY = BusyThresholds()
_UNLIMITED: Final = 1 << 32

REPORT_TTL_S: Final = 10.0
"""A report comes each second; a worker that is silent for ten is soon given up."""


class LoadTracker:
    """Load and price of every registered target, kept up to date so that reading is cheap."""

    def __init__(
        self,
        clock: Callable[[], float],
        report_ttl_s: float = REPORT_TTL_S,
        price: Callable[[TargetLoad], float] = lambda load: load.active,
        thresholds: BusyThresholds = _NEVER_BUSY,
    ) -> None:
        self._clock = clock
        self._report_ttl_s = report_ttl_s
        self._price = price
        self._thresholds = thresholds
        self._busy: set[Target] = set()
        self._loads: dict[Target, TargetLoad] = {}
        self._prices: dict[Target, float] = {}
        self._next_expiry = math.inf  # a lower bound, after newer reports
        self._own: dict[Target, _Own] = {}
        self._ranks: dict[WorkerId, tuple[Target, ...]] = {}
        self._capacity: dict[WorkerId, tuple[int, int]] = {}
        self._reports: dict[Target, RankStatus] = {}
        self._expires: dict[WorkerId, float] = {}
        self._requests: dict[RequestId, _Request] = {}

    def add(
        self, worker_id: WorkerId, targets: Sequence[Target], kv_tokens: int = 0, slots: int = 0
    ) -> None:
        """Register a worker; ``kv_tokens`` and ``slots`` are per rank, 0 if unknown."""
        self._ranks[worker_id] = tuple(targets)
        self._capacity[worker_id] = kv_tokens, slots or _UNLIMITED
        for target in targets:
            self._own[target] = _Own()
            self._update(target)

    def drop(self, worker_id: WorkerId) -> None:
        for target in self._ranks.pop(worker_id, ()):
            del self._own[target], self._loads[target], self._prices[target]
            self._busy.discard(target)
            self._reports.pop(target, None)
        self._capacity.pop(worker_id, None)
        self._expires.pop(worker_id, None)
        lost = [
            request_id
            for request_id, request in self._requests.items()
            if request.target.worker_id == worker_id
        ]
        for request_id in lost:
            del self._requests[request_id]

    def started(
        self,
        request_id: RequestId,
        target: Target,
        prefill_tokens: int,
        prompt_tokens: int,
        choices: int = 1,
    ) -> None:
        """Note that a request was routed to a registered target."""
        self.finished(request_id)
        own = self._own[target]
        own.active += choices
        own.prefill_tokens += prefill_tokens
        self._requests[request_id] = _Request(target, prefill_tokens, prompt_tokens, choices)
        self._update(target)

    def first_token(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is None or request.decoding:
            return
        request.decoding = True
        own = self._own[request.target]
        own.prefill_tokens -= request.prefill_tokens
        own.decode_tokens += request.prompt_tokens
        self._update(request.target)

    def finished(self, request_id: RequestId) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        own = self._own[request.target]
        own.active -= request.choices
        if request.decoding:
            own.decode_tokens -= request.prompt_tokens
        else:
            own.prefill_tokens -= request.prefill_tokens
        self._update(request.target)

    def reported(self, worker_id: WorkerId, ranks: Iterable[RankStatus]) -> None:
        """Take a worker's report on its ranks. Unknown workers and ranks are ignored."""
        expires = self._clock() + self._report_ttl_s
        for report in ranks:
            target = Target(worker_id, report.rank)
            if target in self._own:
                self._reports[target] = report
                self._update(target)
                self._expires[worker_id] = expires
                self._next_expiry = min(self._next_expiry, expires)

    @property
    def engines(self) -> int:
        """Number of targets: the data-parallel ranks of all workers."""
        return len(self._own)

    def load(self, target: Target) -> TargetLoad:
        self._expire()
        return self._loads[target]

    def slots(self) -> Slots:
        self._expire()
        capacities = [self._capacity[target.worker_id] for target in self._own]
        sizes = [slots for _, slots in capacities]
        most = self._thresholds.prefill_tokens or _UNLIMITED
        return Slots(
            sum(sizes),
            max(sizes, default=0),
            sum(report.others_active for report in self._reports.values()),
            sum(min(tokens or _UNLIMITED, most) for tokens, _ in capacities),
            len(self._busy) == len(self._own) > 0,
        )

    def kv_cache(self, target: Target) -> tuple[int, float]:
        """Return the tokens that a target's KV cache can hold, and the fraction in use."""
        tokens, _ = self._capacity.get(target.worker_id, (0, 0))
        return tokens, self._reports.get(target, _NO_REPORT).kv_usage

    def targets(self) -> list[Target]:
        return list(self._loads)

    def view(self) -> tuple[list[TargetLoad], list[float]]:
        self._expire()
        return list(self._loads.values()), list(self._prices.values())

    def busy(self) -> set[Target]:
        self._expire()
        return self._busy

    def shares(self, target: Target) -> tuple[TargetLoad, TargetLoad]:
        """Return the load by this frontend, and by the others as last reported, which includes all
        queued requests. Both are zero if the target is not registered.
        """
        self._expire()
        own, report = self._own.get(target, _NOTHING), self._reports.get(target, _NO_REPORT)
        return (
            TargetLoad(own.active, 0, own.prefill_tokens, own.decode_tokens),
            TargetLoad(
                report.others_active,
                report.waiting,
                report.others_prefill_tokens,
                report.others_decode_tokens,
            ),
        )

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_expiry:
            return
        for worker_id in [one for one, expires in self._expires.items() if expires <= now]:
            del self._expires[worker_id]
            for target in self._ranks[worker_id]:
                self._reports.pop(target, None)
                self._update(target)
        self._next_expiry = min(self._expires.values(), default=math.inf)

    def _update(self, target: Target) -> None:
        own, report = self._own[target], self._reports.get(target, _NO_REPORT)
        active = own.active + report.others_active
        _, slots = self._capacity[target.worker_id]
        load = TargetLoad(
            active,
            # Requests that ended since the report can't be waiting any more.
            max(min(report.waiting, active), active - slots),
            own.prefill_tokens + report.others_prefill_tokens,
            own.decode_tokens + report.others_decode_tokens,
        )
        self._loads[target] = load
        self._prices[target] = self._price(load)
        if self._is_busy(target, load, report.kv_usage):
            self._busy.add(target)
        else:
            self._busy.discard(target)

    def _is_busy(self, target: Target, load: TargetLoad, kv_usage: float) -> bool:
        limits = self._thresholds
        if 0 < limits.prefill_tokens <= load.prefill_tokens:
            return True
        # The report has the actual use, sharing included; prompts in prefill will add to it.
        # Contexts don't tell: they may share most of their blocks.
        tokens, _ = self._capacity[target.worker_id]
        coming = load.prefill_tokens / tokens if tokens else 0.0
        return bool(load.active) and kv_usage + coming > limits.blocks_fraction
