"""Requests that were routed and have not ended.

A decision counts as load at once, with its blocks and media expected on the target. Its end settles
that, and feeds the circuit breaker.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from common.errors import MmRouterError
from common.identity import BlockHash, MmHash, RequestId, Target
from common.observability.telemetry import (
    DECISIONS,
    PREDICTED_CACHED_TOKENS,
    PROMPT_TOKENS,
    REALISED_CACHED_TOKENS,
)
from frontend.router.decision import Decision
from frontend.router.ejection import Ejection
from frontend.router.hashing import HashScheme
from frontend.router.index import APPROXIMATE_TTL_S, PREDICT_TTL_S, Knowledge
from frontend.router.inputs import RoutingRequest
from frontend.router.roster import Roster


class _Routed(NamedTuple):
    decision: Decision
    routed_at: float


class InFlight:
    def __init__(self, clock: Callable[[], float], roster: Roster, ejection: Ejection) -> None:
        self._clock = clock
        self._roster = roster
        self._ejection = ejection
        self._routed: dict[RequestId, _Routed] = {}
        self._others = itertools.count()

    def __len__(self) -> int:
        return len(self._routed)

    def started(
        self,
        request: RoutingRequest,
        decision: Decision,
        hashes: Mapping[HashScheme, list[BlockHash]],
    ) -> None:
        now = self._clock()
        worker_id, request_id = decision.worker_id, decision.request_id
        worker = self._roster.workers[worker_id]
        self._roster.load.started(
            request_id,
            decision.target,
            decision.prefill_tokens,
            decision.prompt_tokens,
            request.choices,
        )
        if worker.prefix_caching:
            exact = decision.index == Knowledge.EXACT
            # Blocks known from events need no prediction beside them.
            chain = hashes[worker.scheme]
            new = chain[decision.overlap_blocks if exact else 0 :]
            indexes, resumes_at = self._roster.indexes, worker.resumes_at(decision.prompt_tokens)
            peek = worker.window_peek(alone=not indexes.known.holdings(decision.target))
            tails = indexes.windows.tails(decision.target, chain, resumes_at, peek)
            self._predict(request_id, decision.target, new, decision.index, now, tails)
        if request.media:
            mm_hashes = [need.mm_hash for need in request.media]
            self._roster.media.touch(worker_id, mm_hashes)
            self._roster.media.expect(worker_id, mm_hashes, now)
            cached = decision.predicted_cached_tokens
            encoded = [need for need in request.media if need.span.end > cached]
            self._roster.encoded.used(decision.target, encoded)
        self._routed[request_id] = _Routed(decision, now)
        self._ejection.routed(worker_id, request_id)
        DECISIONS.labels(worker_id, decision.reason).inc()

    def new_blocks(self, request_id: RequestId) -> Sequence[BlockHash]:
        """Return the blocks of a request that its target did not hold at decision time."""
        return self._roster.indexes.predicted.of(request_id)

    def others_sent(
        self, target: Target, new_blocks: Sequence[BlockHash], media: Sequence[MmHash]
    ) -> None:
        """Expect the blocks and media of another frontend's request, as if it were ours."""
        worker = self._roster.workers.get(target.worker_id)
        if worker is None:
            return
        now = self._clock()
        if worker.prefix_caching:
            knowledge = self._roster.state(target).knowledge
            # The prediction is not withdrawn on a failure, only by events and time.
            name = RequestId(f"other-{next(self._others)}")
            self._predict(name, target, new_blocks, knowledge, now)
        self._roster.media.expect(target.worker_id, media, now)

    def first_token(self, request_id: RequestId, realised_cached_tokens: int = 0) -> None:
        """Note a request's first output, and the prompt tokens taken from the engine's cache."""
        self._roster.load.first_token(request_id)
        routed = self._routed.get(request_id)
        if routed is not None:
            decision = routed.decision
            self._ejection.succeeded(decision.worker_id, decision.incarnation)
            if decision.first_token_s is None:
                decision.realised_cached_tokens = realised_cached_tokens
                self._first_token_came(decision, self._clock() - routed.routed_at)

    def _first_token_came(self, decision: Decision, after_s: float) -> None:
        # Increment together, so that in each interval all three cover the same requests.
        worker_id = decision.worker_id
        PROMPT_TOKENS.labels(worker_id).inc(decision.prompt_tokens)
        PREDICTED_CACHED_TOKENS.labels(worker_id).inc(decision.predicted_cached_tokens)
        REALISED_CACHED_TOKENS.labels(worker_id).inc(decision.realised_cached_tokens or 0)
        decision.first_token_s = after_s
        expected_s = decision.predicted_first_token_s
        if expected_s is not None:
            self._roster.times.first_token_came(expected_s * 1e3, after_s * 1e3)

    def finished(self, request_id: RequestId, *, served: bool = False) -> None:
        """Note a request's end. Unknown and repeated ids are ignored."""
        self._roster.load.finished(request_id)
        routed = self._routed.pop(request_id, None)
        if routed is None:
            return
        decision = routed.decision
        self._ejection.ended(decision.worker_id, request_id)
        if not served:
            self._roster.indexes.predicted.forget(request_id)
            return
        # A prediction stays until it expires: the engine may finish a short request before its
        # events are out, and an eviction withdraws the prediction as well.
        stores_blocks = decision.overlap_blocks < decision.prompt_blocks
        if stores_blocks and self._roster.has(decision.worker_id, decision.incarnation):
            self._roster.served(decision.target, routed.routed_at)

    def failed(self, decision: Decision, error: MmRouterError) -> None:
        """Count a failure against the worker if the error blames it and that same run is still
        here.
        """
        worker_id, run = decision.worker_id, decision.incarnation
        if error.blame and self._roster.has(worker_id, run):
            self._ejection.failed(worker_id, run, error.blame)

    def _predict(
        self,
        request_id: RequestId,
        target: Target,
        hashes: Sequence[BlockHash],
        knowledge: str,
        now: float,
        tails: Mapping[int, Sequence[BlockHash]] = MappingProxyType({}),
    ) -> None:
        exact = knowledge == Knowledge.EXACT
        lifetime_s = PREDICT_TTL_S if exact else APPROXIMATE_TTL_S
        predicted = self._roster.indexes.predicted
        predicted.predict(request_id, target, hashes, lifetime_s, now, tails)
