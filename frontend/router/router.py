"""The router: decides where a request runs.

It sends nothing to workers and only listens to their KV events. It runs on one event loop. Other
components report to its parts directly.
"""

import random
import time
from collections.abc import Callable, Collection, Sequence, Set
from typing import Final

from common.errors import FleetBusyError, NoWorkerError
from common.identity import BlockHash, Incarnation, WorkerId
from common.observability.telemetry import stage
from frontend.router.crowding import Crowding
from frontend.router.decision import CLIENT_ID_LENGTH, Considered, Decision, DecisionLog
from frontend.router.ejection import Ejection
from frontend.router.events import ZmqFeeds
from frontend.router.hashing import HashMemo, HashScheme, LoraKey
from frontend.router.in_flight import InFlight
from frontend.router.inputs import RoutingRequest
from frontend.router.modes import Choice, Situation, mode_named
from frontend.router.roster import FeedMaker, Roster
from frontend.router.selection import Candidates, Estimate, cheapest, cost_of_work
from frontend.router.settings import RouterSettings

LOADING_TOKENS: Final = 512
"""Cost, in prompt tokens, of an adapter that the engine has but does not use: copying one to a GPU
takes some ten milliseconds, and may evict another."""

CANDIDATES: Final = 16
"""Cheapest candidates recorded per decision: enough to explain it, in a large fleet too."""


class Router:
    """Decide where requests run.

    Its parts are told directly: ``media`` of acks and nacks, ``load`` of reports, ``ejection`` of
    lost links, ``in_flight`` of first tokens, failures and ends. ``seed`` makes random choices
    reproducible.

    Attributes:
        drained: runs of workers that an operator drains. They finish their requests, also if lost
            for a while or not yet present. A later run serves.
        resting: workers that report being paused or asleep.
    """

    def __init__(
        self,
        settings: RouterSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        feeds: FeedMaker | None = None,
        seed: int | None = None,
    ) -> None:
        self.settings = settings = RouterSettings() if settings is None else settings
        self._clock = clock
        self._mode = mode_named(settings.mode)()
        self._random = random.Random(seed)
        feeds = feeds or ZmqFeeds(clock=clock)
        self.roster = Roster(settings, clock, feeds)
        self.media = self.roster.media
        self.load = self.roster.load
        self.ejection = Ejection(clock, base_s=settings.eject_base_s)
        self.drained: dict[WorkerId, Incarnation] = {}
        self.resting: set[WorkerId] = set()
        self.in_flight = InFlight(clock, self.roster, self.ejection)
        self.crowding = Crowding(clock, self.load)
        self.decisions = DecisionLog()

    async def close(self) -> None:
        """Remove all workers and stop every task. The router is unusable afterwards."""
        await self.roster.close()

    def hash(self, request: RoutingRequest) -> dict[HashScheme, list[BlockHash]]:
        """Return the prompt's block hashes under every scheme of the fleet, usually one.

        About 1 µs a block, and 0.2 µs in a beginning that a recent prompt shares. Thread-safe: hash
        long prompts in another thread and pass them to :meth:`route` as
        :attr:`RoutingRequest.hashes`, which are not computed again.

        Raises:
            RequestRejectedError: the prompt can't be hashed.
        """
        given = request.hashes or {}
        return {
            scheme: given[scheme] if scheme in given else _hash(request, hasher)
            for scheme, hasher in list(self.roster.hashers.items())
        }

    def route(
        self, request: RoutingRequest, *, exclude: Collection[WorkerId] = (), accepted: bool = False
    ) -> Decision:
        """Decide where a request runs, and count it as running there.

        Args:
            exclude: workers not to consider, such as those that failed on it before.
            accepted: never refuse the request because all workers are busy.

        Raises:
            NoWorkerError: no worker is left.
            FleetBusyError: every worker is busy.
            RequestRejectedError: the prompt can't be hashed.
        """
        started = time.perf_counter()
        candidates = self._candidates([*exclude, *self._without(request.lora)], accepted)
        hashes = self.hash(request)
        with stage("match"):
            estimate = self.roster.estimator.estimate(request, hashes, self._clock())
        costs = candidates.costs(estimate, cost_of_work)
        costs = self._with_loading(costs, candidates, request)
        choice = self._choose(request, candidates, costs)
        decision = self._decision(request, candidates, costs, estimate, choice)
        self.in_flight.started(request, decision, hashes)
        self.decisions.add(decision)
        decision.micros = (time.perf_counter() - started) * 1e6
        return decision

    def _without(self, adapter: LoraKey | None) -> list[WorkerId]:
        """Return the workers without the requested adapter. Raises NoWorkerError if all lack it."""
        if adapter is None:
            return []
        workers = self.roster.workers
        lacking = [name for name, one in workers.items() if adapter not in one.adapters]
        if lacking and len(lacking) == len(workers):
            raise NoWorkerError(f"no worker has the adapter {adapter.name} any more")
        return lacking

    def _with_loading(
        self, costs: list[float], candidates: Candidates, request: RoutingRequest
    ) -> list[float]:
        if request.lora is None:
            return costs
        workers, name = self.roster.workers, request.lora.name
        return [
            cost if name in workers[target.worker_id].active_adapters else cost + LOADING_TOKENS
            for cost, target in zip(costs, candidates.targets, strict=True)
        ]

    def _choose(
        self, request: RoutingRequest, candidates: Candidates, costs: Sequence[float]
    ) -> Choice:
        targets = candidates.targets
        if len(targets) == 1:
            return Choice(0, "only-worker")
        choice = self._mode.choose(
            Situation(request, targets, costs, candidates.loads, candidates.slots, self._random)
        )
        return choice if choice.reason else Choice(choice.position, self.settings.mode)

    def check_room(self) -> None:
        """Raise the error that :meth:`route` would raise now, before there is a prompt."""
        self._candidates((), accepted=False)

    def _candidates(self, exclude: Collection[WorkerId], accepted: bool) -> Candidates:
        candidates = self.roster.candidates()
        if left_out := {*exclude, *self._drained(), *self.resting}:
            candidates = candidates.without(left_out)
        if not candidates.targets:
            raise NoWorkerError(
                "no worker is registered"
                if not self.roster.workers
                else "every registered worker is excluded, drained, paused or asleep, or failed on "
                "this request"
            )
        return self._fit(candidates, accepted)

    def _drained(self) -> Set[WorkerId]:
        workers = self.roster.workers
        for name, run in list(self.drained.items()):
            if name in workers and workers[name].incarnation != run:
                del self.drained[name]  # a successor has the name
        return self.drained.keys() & workers.keys()

    def _fit(self, candidates: Candidates, accepted: bool) -> Candidates:
        """Return the candidates that are neither ejected nor busy. If all are ejected, return the
        least bad. If all are busy, raise FleetBusyError unless the request was accepted before.
        """
        if unusable := self.ejection.unusable():
            trusted = candidates.without(unusable)
            if not trusted.targets:
                workers = {target.worker_id for target in candidates.targets}
                least_bad = self.ejection.least_bad(workers)
                trusted = candidates.only(lambda target: target.worker_id in least_bad)
            candidates = trusted
        if busy := self.load.busy():
            free = candidates.only(lambda target: target not in busy)
            if free.targets:
                return free
            if not accepted:
                self.crowding.refused()
                raise FleetBusyError("every worker is busy: try again later")
        return candidates

    def _decision(
        self,
        request: RoutingRequest,
        candidates: Candidates,
        costs: Sequence[float],
        estimate: Estimate,
        choice: Choice,
    ) -> Decision:
        target = candidates.targets[choice.position]
        worker = self.roster.workers[target.worker_id]
        prompt_tokens = len(request.token_ids)
        work = estimate.on(target)
        considered = self._considered(candidates, costs, estimate, choice.position)
        expected = next(one.first_token_ms for one in considered if one.target == target)
        return Decision(
            request_id=request.request_id,
            worker_id=target.worker_id,
            rank=target.rank,
            mode=self.settings.mode,
            reason=estimate.advantage(target) if choice.reason == "cost" else choice.reason,
            index=self.roster.state(target).knowledge.value,
            time=time.time(),
            micros=0.0,
            prompt_tokens=prompt_tokens,
            prompt_blocks=prompt_tokens // worker.block_size,
            overlap_blocks=work.overlap_blocks,
            predicted_cached_tokens=work.overlap_blocks * worker.block_size,
            considered=considered,
            candidates_total=len(candidates.targets),
            client_id=request.client_id[:CLIENT_ID_LENGTH],
            incarnation=worker.incarnation,
            prefill_tokens=work.prefill_tokens + work.media_tokens,
            predicted_first_token_s=None if expected is None else expected / 1e3,
            work=work,
        )

    def _considered(
        self, candidates: Candidates, costs: Sequence[float], estimate: Estimate, chosen: int
    ) -> list[Considered]:
        found, first_token_ms, now = [], self.roster.times.first_token_ms, self._clock()
        for position in cheapest(costs, CANDIDATES, chosen):
            target, load = candidates.targets[position], candidates.loads[position]
            work = estimate.on(target)
            found.append(
                Considered(
                    target,
                    self.roster.state(target).knowledge,
                    work,
                    load,
                    costs[position],
                    candidates.paces[position],
                    first_token_ms(target, load, work, now),
                )
            )
        return found


def _hash(request: RoutingRequest, hasher: HashMemo) -> list[BlockHash]:
    size = hasher.scheme.block_size
    return hasher.hash(
        request.token_ids,
        request.block_mm_infos(size) if request.media else (),
        lora=request.lora,
        cache_salt=request.cache_salt,
        embeds_digests=request.embeds and request.embeds.digests(size),
    )
