"""Several frontends over idle workers, with real routers and loads of frontends; time is simulated.

Counts how often a request goes to a worker that has one while another has none: what frontends
that know nothing of each other do, and what no frontend of its own would ever do.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from backend_worker.plane.frontend_loads import Account, FrontendLoads
from common.identity import RequestId, WorkerId
from frontend.router.router import Router
from tests.fakes.reports import rank_report
from tests.fakes.routing import Clock, request, worker

PROMPT = 512
WAY_S = 0.002
"""From a decision to the worker, and from the worker to a frontend."""


class Telling(NamedTuple):
    """When workers tell what others have.

    Attributes:
        pause_s: least time between two tellings, for each frontend told; None for none but
            the regular ones.
        subtracts: whether frontends are told sums instead, and take off what they have.
    """

    pause_s: float | None
    subtracts: bool = False


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        requests: decided while some worker was idle.
        piled: those of them that went to a worker that was not.
        told: reports to frontends, the regular ones aside.
    """

    requests: int = 0
    piled: int = 0
    told: int = 0


@dataclass(eq=False)
class _Frontend:
    router: Router
    accounts: dict[WorkerId, Account] = field(default_factory=dict)


class Crowd:
    """Requests that come at random, each at a frontend drawn at random.

    Args:
        rate: requests a second, of all frontends.
        prefill_s, decode_s: how long each runs.
    """

    def __init__(
        self,
        frontends: int,
        workers: int,
        rate: float,
        telling: Telling,
        prefill_s: float = 0.05,
        decode_s: float = 0.2,
        seed: int = 1,
    ) -> None:
        self._random = random.Random(seed)
        self._telling = telling
        self._rate, self._steps = rate, (prefill_s, decode_s)
        self._clock = Clock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = [WorkerId(f"w{number}") for number in range(workers)]
        self._given = dict.fromkeys(self._names, 0)
        self._pausing = set[WorkerId]()
        self._frontends = [
            _Frontend(Router(clock=self._clock, seed=seed + i)) for i in range(frontends)
        ]
        self._loads = {
            name: FrontendLoads((0,), partial(self._changed, name)) for name in self._names
        }
        self.outcome = Outcome()

    async def run(self, requests: int) -> Outcome:
        """Decide so many requests."""
        for frontend in self._frontends:
            for name in self._names:
                await frontend.router.roster.add(worker(name))
                frontend.accounts[name] = self._loads[name].open()
        when = 0.0
        for number in range(requests):
            when += self._random.expovariate(self._rate)
            self._later(when, partial(self._arrive, number))
        for name in self._names:
            self._later(self._random.random(), partial(self._regularly, name, when))
        start = self._clock.now
        while self._events:
            self._clock.now, _, act = heapq.heappop(self._events)
            act()
        assert self._clock.now >= start
        for frontend in self._frontends:
            assert len(frontend.router.in_flight) == 0
            await frontend.router.close()
        return self.outcome

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._clock.now + seconds, next(self._order), act))

    def _arrive(self, number: int) -> None:
        frontend = self._random.choice(self._frontends)
        tokens = [number * PROMPT + position for position in range(PROMPT)]
        decision = frontend.router.route(request(tokens))
        name = decision.worker_id
        if min(self._given.values()) == 0:
            self.outcome.requests += 1
            self.outcome.piled += self._given[name] > 0
        self._given[name] += 1
        self._later(WAY_S, lambda: self._serve(frontend, name, decision.request_id))

    def _serve(self, frontend: _Frontend, name: WorkerId, request_id: RequestId) -> None:
        entry = frontend.accounts[name].started(0, PROMPT, PROMPT)
        load = frontend.router.in_flight
        prefill_s, decode_s = self._steps

        def end() -> None:
            entry.ended()
            self._given[name] -= 1
            self._later(WAY_S, lambda: load.finished(request_id, served=True))

        self._later(prefill_s, entry.first_output)
        self._later(prefill_s + WAY_S, lambda: load.first_token(request_id))
        self._later(prefill_s + decode_s, end)

    def _changed(self, name: WorkerId) -> None:
        if self._telling.pause_s is not None and name not in self._pausing:
            self._pausing.add(name)
            self._later(0.0, lambda: self._tell_news(name))

    def _tell_news(self, name: WorkerId) -> None:
        """As the worker's service does: at once, then not for a while."""
        assert self._telling.pause_s is not None
        listeners = [one for one in self._frontends if one.accounts[name].has_news]
        for frontend in listeners:
            self._tell(frontend, name)
        self.outcome.told += len(listeners)
        if listeners:
            self._later(self._telling.pause_s * len(listeners), lambda: self._tell_news(name))
        else:
            self._pausing.discard(name)

    def _regularly(self, name: WorkerId, until: float) -> None:
        for frontend in self._frontends:
            self._tell(frontend, name)
        if until > 0:
            self._later(1.0, lambda: self._regularly(name, until - 1.0))

    def _tell(self, frontend: _Frontend, name: WorkerId) -> None:
        account, total = frontend.accounts[name], self._loads[name].sums[0]
        account.told()
        share = account.others()[0]
        sums = total.active, total.prefill_tokens, total.decode_tokens

        def hear() -> None:
            report = rank_report(
                active=share.active,
                prefill_tokens=share.prefill_tokens,
                decode_tokens=share.decode_tokens,
            )
            if self._telling.subtracts:
                (target,) = (one for one in frontend.router.roster.targets() if one[0] == name)
                own, _ = frontend.router.load.shares(target)
                less = (own.active, own.prefill_tokens, own.decode_tokens)
                active, prefill, decode = (
                    max(0, its - ours) for its, ours in zip(sums, less, strict=True)
                )
                report = rank_report(active=active, prefill_tokens=prefill, decode_tokens=decode)
            frontend.router.load.reported(name, [report])

        self._later(WAY_S, hear)
