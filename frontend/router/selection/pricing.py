"""What a request costs at each candidate, in milliseconds, and when its first token is expected.

::

    first token = wait     for prompts sent there that have no output yet, as far as not computed,
                           and for an answer to end if the target runs as many as it can
                + prefill  rate * prompt tokens the target has to prefill
                + encode   rate * media tokens it has to encode
                + ship     rate * MiB of media tensors it lacks
                + step     a step of its engine, longer with each request that decodes there
                + overhead of everything else, learned from first tokens that came

    cost        = the same without overhead, with
                  LOAD_WEIGHT * wait, since work that is done twice makes all others wait
                + decode   what requests decoding there add to the time of an average answer
                + queue    a weight for each request that its engine reported as waiting

Rates are the target's own (``step_times.py``). A weight of prefill that the operator gave is not
learned: it holds as it stands, in tokens of which each takes as long as the fleet's.
"""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from common.identity import RequestId, Target, WorkerId
from common.request_plane.step_sums import EngineSums, ShippingSums
from frontend.router.selection.backlog import Backlog
from frontend.router.selection.candidates import Candidates
from frontend.router.selection.estimate import Estimate
from frontend.router.selection.load import TargetLoad
from frontend.router.selection.selector import LOAD_WEIGHT, Costs, Selector, Work
from frontend.router.selection.step_times import StepTimes
from frontend.router.settings import CostUnit, RouterSettings

_MIB: Final = 1 << 20

_OVERHEAD_PACE: Final = 0.05
"""How much of an error the expected overhead takes over."""

_MOST_OVERHEAD_MS: Final = 10_000.0


class Terms(NamedTuple):
    """What a unit of each term costs at one target, in milliseconds.

    Attributes:
        prefill, encode: a token.
        ship: a byte.
        step: any step.
        decode: a request that decodes there, in each step.
        answer: the same over an average answer.
        queue: a request in its queue.
    """

    prefill: float
    encode: float
    ship: float
    step: float
    decode: float
    answer: float
    queue: float

    def own(self, work: Work) -> float:
        """What a request takes there."""
        return (
            self.prefill * work.prefill_tokens
            + self.encode * work.media_tokens
            + self.ship * work.ship_bytes
        )


class Moment(NamedTuple):
    """How things stand at one candidate, as a decision sees it.

    Attributes:
        wait_ms: until prompts sent before are computed.
        decoding: requests that decode.
    """

    terms: Terms
    load: TargetLoad
    wait_ms: float
    decoding: int

    def costs(self, work: Work) -> Costs:
        """The parts of a request's cost."""
        terms = self.terms
        return Costs(
            prefill=terms.prefill * work.prefill_tokens,
            encode=terms.encode * work.media_tokens,
            ship=terms.ship * work.ship_bytes,
            load=LOAD_WEIGHT * self.wait_ms,
            decode=terms.answer * self.decoding,
            queue=terms.queue * self.load.waiting,
            step=terms.step + terms.decode * self.decoding,
        )

    def first_token_ms(self, work: Work) -> float:
        """From the decision on, overhead left out."""
        terms = self.terms
        return self.wait_ms + terms.own(work) + terms.step + terms.decode * self.decoding


class Pricing:
    """Prices what a request costs at each candidate, in the unit that the settings say.

    Args:
        clock: monotonic seconds.

    Attributes:
        times: how long steps take.
        backlog: prompts that are not computed yet.
        overhead_ms: what first tokens take longer than engines do.
    """

    def __init__(
        self, settings: RouterSettings, selector: Selector, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._selector = selector
        self._clock = clock
        self._terms: dict[Target, Terms] = {}
        self._slots: dict[Target, int] = {}
        self.times = StepTimes()
        self.backlog = Backlog(clock)
        self.overhead_ms = 0.0

    @property
    def in_ms(self) -> bool:
        """Whether costs are milliseconds, rather than tokens."""
        return self._settings.costs is CostUnit.TIME

    def reported(
        self, worker_id: WorkerId, steps: Iterable[EngineSums], shipping: ShippingSums | None
    ) -> bool:
        """What a worker's steps add up to by now; whether that tells something of all workers."""
        before = self.times.fleet
        self.times.reported(worker_id, steps, shipping)
        if self.times.fleet != before:
            self._terms.clear()
            return True
        for one in steps:
            self._terms.pop(Target(worker_id, one.rank), None)
        return False

    def add(self, target: Target, slots: int) -> None:
        """Register a target.

        Args:
            slots: requests it can run at once, 0 if unknown.
        """
        self._slots[target] = slots

    def drop(self, target: Target) -> None:
        """It is gone."""
        self._slots.pop(target, None)
        self.times.drop(target)
        self.backlog.drop(target)
        self._terms.pop(target, None)

    def prompt_cost(self, tokens: int) -> float:
        """Of prefilling a prompt somewhere; that of one token for an empty one."""
        return max(tokens, 1) * (self.times.fleet.prefill if self.in_ms else 1.0)

    def load_price(self, target: Target, load: TargetLoad) -> float:
        """The part of the cost that changes with a target's load only, not with time."""
        if not self.in_ms:
            return self._selector.load_cost(load)
        terms = self.terms(target)
        decoding = load.active - self.backlog.count(target)
        return (
            terms.step
            + (terms.decode + terms.answer) * decoding
            + terms.queue * load.waiting
            + LOAD_WEIGHT * (self._others_ms(target, load) + self._slot_ms(target, load))
        )

    def costs(self, candidates: Candidates, estimate: Estimate) -> list[float]:
        """What a request costs at each candidate.

        Args:
            estimate: its work on each target.
        """
        if not self.in_ms:
            return candidates.costs(estimate, self._selector.work_cost)
        targets, nowhere = candidates.targets, estimate.nowhere
        terms = [self._terms.get(target) or self.terms(target) for target in targets]
        tokens, media, nbytes = nowhere[1:]
        costs = [
            cost + one[0] * tokens + one[1] * media + one[2] * nbytes
            for cost, one in zip(candidates.load_costs, terms, strict=True)
        ]
        positions = candidates.positions
        for target, work in estimate.elsewhere.items():
            if (position := positions.get(target)) is not None:
                own = terms[position].own(work)
                costs[position] = candidates.load_costs[position] + own
        for target, wait_ms in self._waits():
            if (position := positions.get(target)) is not None:
                costs[position] += LOAD_WEIGHT * wait_ms
        return costs

    def moment(self, target: Target, load: TargetLoad) -> Moment:
        """How things stand at a target now."""
        wait_ms = self.backlog.wait_ms(target, self._clock(), in_time=self.times.known)
        return Moment(
            self.terms(target),
            load,
            wait_ms + self._others_ms(target, load) + self._slot_ms(target, load),
            load.active - self.backlog.count(target),
        )

    def first_token_ms(self, moment: Moment, work: Work) -> float | None:
        """When a request's first token is expected after the decision; None if little is known."""
        return moment.first_token_ms(work) + self.overhead_ms if self.times.known else None

    def first_token_came(self, expected_ms: float, after_ms: float) -> None:
        """One that was expected came."""
        # Not more than twice what was expected: a single request may be delayed by anything.
        error = min(after_ms - expected_ms, expected_ms)
        overhead_ms = self.overhead_ms + _OVERHEAD_PACE * error
        self.overhead_ms = min(max(overhead_ms, 0.0), _MOST_OVERHEAD_MS)

    def started(self, request_id: RequestId, target: Target, work: Work) -> None:
        """A request was sent to a target."""
        terms = self.terms(target)
        ms = terms.prefill * work.prefill_tokens + terms.encode * work.media_tokens
        self.backlog.started(request_id, target, work.prefill_tokens + work.media_tokens, ms)

    def terms(self, target: Target) -> Terms:
        """What a unit of each term costs at a target."""
        found = self._terms.get(target)
        if found is None:
            found = self._terms[target] = self._new_terms(target)
        return found

    def _new_terms(self, target: Target) -> Terms:
        settings, rates = self._settings, self.times.rates(target)
        given = "prefill_weight" in settings.model_fields_set
        return Terms(
            settings.prefill_weight * self.times.fleet.prefill if given else rates.prefill,
            rates.encode,
            rates.ship / _MIB,
            rates.step,
            rates.decode,
            rates.decode * self.times.answer_tokens,
            self._selector.weights.queue * rates.prefill,
        )

    def _others_ms(self, target: Target, load: TargetLoad) -> float:
        """What other frontends' prompts take. How far they are computed is not known."""
        tokens = load.prefill_tokens - self.backlog.tokens(target)
        return max(tokens, 0) * self.terms(target).prefill

    def _slot_ms(self, target: Target, load: TargetLoad) -> float:
        """How long it takes until enough answers have ended for one more request to run."""
        slots = self._slots.get(target, 0)
        ahead = load.active + 1 - slots
        if not slots or ahead <= 0:
            return 0.0
        terms = self.terms(target)
        answer_ms = self.times.answer_tokens * (terms.step + terms.decode * slots)
        return answer_ms * ahead / slots

    def _waits(self) -> Iterable[tuple[Target, float]]:
        return self.backlog.waits(self._clock(), in_time=self.times.known)
