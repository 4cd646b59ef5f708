"""How busy each target is, in tokens: from what we routed and what workers report.

Our own requests are known at once and exactly. A report comes late but includes
requests of other frontends: what exceeds our own at that moment counts as foreign
load until the next report, or until the report is too old.

Also here: which targets are busy, so that they should get nothing more.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.identity import RequestId, Target, WorkerId
from common.telemetry import BUSY_WORKERS


class TargetLoad(NamedTuple):
    """Load of one target, foreign requests included.

    Attributes:
        active: requests sent and not finished.
        waiting: those of them in the worker's queue, as it last reported.
        prefill_tokens: prompt tokens still to compute, cached ones left out.
        decode_tokens: tokens in the contexts of requests that are decoding.
    """

    active: float
    waiting: float
    prefill_tokens: float
    decode_tokens: float


class BusyThresholds(NamedTuple):
    """When a target has so much to do that it should get nothing more.

    Attributes:
        blocks_fraction: share of its KV cache, which more than that must be in use.
        prefill_tokens: prompt tokens waiting for prefill, 0 for any number.
    """

    blocks_fraction: float = 1.0
    prefill_tokens: int = 0


@dataclass(slots=True)
class _Own:
    active: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    waiting_prompt_tokens: int = 0


@dataclass(slots=True)
class _Request:
    target: Target
    prefill_tokens: int
    prompt_tokens: int
    decoding: bool = False


class _Foreign(NamedTuple):
    """One rank's share of what a worker reported beyond our own requests."""

    active: float = 0.0
    waiting: float = 0.0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    kv_usage: float = 0.0
    expires: float = 0.0


_NO_FOREIGN = _Foreign()
_NEVER_BUSY = BusyThresholds()


class LoadTracker:
    """Load of every registered target, kept up to date so that reading it is cheap.

    Args:
        clock: monotonic seconds.
        report_ttl_s: seconds a report counts.
        price: what a load is worth to the caller; read with :meth:`view`.
        thresholds: from when on a target is busy.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        report_ttl_s: float = 10.0,
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
        # In the order in which reports came, so that the oldest is first.
        self._expiring: deque[tuple[float, WorkerId]] = deque()
        self._own: dict[Target, _Own] = {}
        self._ranks: dict[WorkerId, tuple[Target, ...]] = {}
        self._kv_tokens: dict[WorkerId, int] = {}
        self._foreign: dict[WorkerId, _Foreign] = {}
        self._requests: dict[RequestId, _Request] = {}
        BUSY_WORKERS.set_function(lambda: len({one.worker_id for one in self.busy()}))

    def add(self, worker_id: WorkerId, targets: Sequence[Target], kv_tokens: int = 0) -> None:
        """Register a worker.

        Args:
            kv_tokens: tokens that fit into the KV cache of one rank, 0 if unknown.
        """
        self._ranks[worker_id] = tuple(targets)
        self._kv_tokens[worker_id] = kv_tokens
        for target in targets:
            self._own[target] = _Own()
            self._update(target)

    def drop(self, worker_id: WorkerId) -> None:
        """Forget a worker and the requests that ran there."""
        for target in self._ranks.pop(worker_id, ()):
            del self._own[target], self._loads[target], self._prices[target]
            self._busy.discard(target)
        self._kv_tokens.pop(worker_id, None)
        self._foreign.pop(worker_id, None)
        lost = [
            request_id
            for request_id, request in self._requests.items()
            if request.target.worker_id == worker_id
        ]
        for request_id in lost:
            del self._requests[request_id]

    def started(
        self, request_id: RequestId, target: Target, prefill_tokens: int, prompt_tokens: int
    ) -> None:
        """A request was routed to a registered target.

        Args:
            prefill_tokens: tokens it has to compute there before its first output.
            prompt_tokens: tokens its context will hold then.
        """
        self.finished(request_id)
        own = self._own[target]
        own.active += 1
        own.prefill_tokens += prefill_tokens
        own.waiting_prompt_tokens += prompt_tokens
        self._requests[request_id] = _Request(target, prefill_tokens, prompt_tokens)
        self._update(target)

    def first_token(self, request_id: RequestId) -> None:
        """A request left prefill. Unknown and repeated ids are ignored."""
        request = self._requests.get(request_id)
        if request is None or request.decoding:
            return
        request.decoding = True
        own = self._own[request.target]
        own.prefill_tokens -= request.prefill_tokens
        own.waiting_prompt_tokens -= request.prompt_tokens
        own.decode_tokens += request.prompt_tokens
        self._update(request.target)

    def finished(self, request_id: RequestId) -> None:
        """A request ended in any way. Unknown and repeated ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        own = self._own[request.target]
        own.active -= 1
        if request.decoding:
            own.decode_tokens -= request.prompt_tokens
        else:
            own.prefill_tokens -= request.prefill_tokens
            own.waiting_prompt_tokens -= request.prompt_tokens
        self._update(request.target)

    def reported(
        self,
        worker_id: WorkerId,
        *,
        running: int,
        waiting: int,
        queued_tokens: int,
        kv_usage: float,
    ) -> None:
        """A worker's view of itself, over all its ranks. Unknown workers are ignored.

        Args:
            running: requests being computed.
            waiting: requests in its queue.
            queued_tokens: lengths of prompts in prefill, what is cached of them included.
            kv_usage: share of its KV cache in use by requests, 0 to 1.
        """
        targets = self._ranks.get(worker_id)
        if not targets:
            return
        own = [self._own[target] for target in targets]
        ranks = len(targets)
        used_tokens = kv_usage * self._kv_tokens[worker_id] * ranks
        self._foreign[worker_id] = _Foreign(
            active=max(0, running + waiting - sum(one.active for one in own)) / ranks,
            waiting=waiting / ranks,
            prefill_tokens=max(0, queued_tokens - sum(one.waiting_prompt_tokens for one in own))
            / ranks,
            decode_tokens=max(
                0.0,
                used_tokens - sum(one.prefill_tokens + one.decode_tokens for one in own),
            )
            / ranks,
            kv_usage=kv_usage,
            expires=self._clock() + self._report_ttl_s,
        )
        self._expiring.append((self._foreign[worker_id].expires, worker_id))
        for target in targets:
            self._update(target)

    def load(self, target: Target) -> TargetLoad:
        """Present load of a registered target."""
        self._expire()
        return self._loads[target]

    def targets(self) -> list[Target]:
        """All registered targets, in the order of :meth:`view`."""
        return list(self._loads)

    def view(self) -> tuple[list[TargetLoad], list[float]]:
        """Present loads of all registered targets, and their prices."""
        self._expire()
        return list(self._loads.values()), list(self._prices.values())

    def busy(self) -> set[Target]:
        """Targets that should get nothing more, a live view."""
        self._expire()
        return self._busy

    def statistics(self) -> dict[Target, TargetLoad]:
        """Load of every target."""
        self._expire()
        return dict(self._loads)

    def _expire(self) -> None:
        """Forget reports that are too old."""
        while self._expiring and self._expiring[0][0] <= self._clock():
            _, worker_id = self._expiring.popleft()
            foreign = self._foreign.get(worker_id)
            if foreign is not None and foreign.expires <= self._clock():
                del self._foreign[worker_id]
                for target in self._ranks[worker_id]:
                    self._update(target)

    def _update(self, target: Target) -> None:
        own = self._own[target]
        foreign = self._foreign.get(target.worker_id, _NO_FOREIGN)
        active = own.active + foreign.active
        load = TargetLoad(
            active,
            # Requests that ended since the report can't be waiting any more.
            min(foreign.waiting, active),
            own.prefill_tokens + foreign.prefill_tokens,
            own.decode_tokens + foreign.decode_tokens,
        )
        self._loads[target] = load
        self._prices[target] = self._price(load)
        if self._is_busy(target, load, own, foreign):
            self._busy.add(target)
        else:
            self._busy.discard(target)

    def _is_busy(self, target: Target, load: TargetLoad, own: _Own, foreign: _Foreign) -> bool:
        limits = self._thresholds
        if 0 < limits.prefill_tokens <= load.prefill_tokens:
            return True
        # The report says what is in use, whoever shares it; prompts in prefill will add to
        # that. Contexts of our own requests don't tell: they may share most of their blocks.
        tokens = self._kv_tokens[target.worker_id]
        coming = own.prefill_tokens / tokens if tokens else 0.0
        return bool(own.active or foreign.active) and (
            foreign.kv_usage + coming > limits.blocks_fraction
        )
