"""Speed of each target at computing prompts, learned from its engine's steps. No I/O.

A step with prompts is taken to last::

    pace * (step + token * (prompt tokens prefilled + media tokens encoded))      milliseconds

The rates ``step`` and ``token`` are the fleet's: medians over targets of least-squares fits to each
target's own steps. The pace is the target's: how many times longer its steps took than the fleet's
rates predict. A few steps at the fleet's rates are added as a prior, so that a little-known target
counts as the others do. Old steps fade by the number of newer ones, and expire after a while
without steps. Rates and paces are positive and finite, whatever a worker reports.
"""

import math
import operator
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import msgspec

from common.identity import Target, WorkerId
from common.request_plane.step_sums import StepSums
from frontend.router.selection.costs import Work
from frontend.router.selection.load import TargetLoad


class Rates(NamedTuple):
    """Milliseconds per step, whatever it computes, and per token prefilled or encoded."""

    step: float
    token: float

    def ms(self, steps: float, tokens: float) -> float:
        return self.step * steps + self.token * tokens


GUESS: Final = Rates(step=8.0, token=0.04)
"""Rates of a model of seven billion parameters on one H100. They count as a few steps of each
target."""

MEMORY: Final = 1000.0
"""Newer steps after which a step counts for a third."""

FORGET_S: Final = 30.0
"""Time without a step after which a target counts like the median again. Otherwise a slow target
would get no request while load is light, and could not show that it recovered."""

ENOUGH_STEPS: Final = 20.0
"""Minimum steps of the whole fleet for paces to count and first tokens to be predicted."""

_ENOUGH_OF_ONE: Final = 3.0
"""Minimum steps of one target for it to count in the fleet's rates."""

_TRUSTED_STEPS: Final = 3.0
"""Weight of the prior, in steps."""

_TRUSTED_TOKENS: Final = 1000.0
"""Tokens in each step of one half of the prior; the other half has none."""

_PACES: Final = (1e-3, 1e6)

_FREEDOM: Final = (0.05, 20.0)
"""Bounds of a rate, as factors of the guess scaled to the target's pace."""

_ROUNDED: Final = math.log(1.25)
"""Costs use powers of 1.25: targets of one kind are equal although their paces differ by noise.
Ties are then broken at random, and frontends do not all prefer the same target."""

_REPORTS_A_FIT: Final = 4
"""Maximum fits of the fleet's rates while every target reports once."""

_OVERHEAD_PACE: Final = 0.05
"""Share of an error that the expected overhead takes over."""

_MAX_OVERHEAD_MS: Final = 10_000.0

_Sums: TypeAlias = tuple[float, ...]
"""Steps, tokens, squares, ms, products, as in :class:`~common.request_plane.step_sums.StepSums`."""

_NO_SUMS: Final[_Sums] = (0.0,) * 5


@dataclass(slots=True)
class _Known:
    """Last report of a target, faded sums over its steps, and the time of its last step."""

    last: _Sums = _NO_SUMS
    sums: _Sums = _NO_SUMS
    rates: Rates = GUESS
    stepped: float = float("-inf")


class StepTimes:
    """Paces of all targets, and predictions of first tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._targets: dict[Target, _Known] = {}
        self._reports = 0
        self._overhead_ms = 0.0
        self.fleet = GUESS
        self.known = False

    def pace(self, target: Target, now: float) -> float:
        """Return how many times longer a target takes than the median one; 1 if unknown."""
        known = self._targets.get(target)
        if known is None or not self.known or _is_forgotten(known, now):
            return 1.0
        return _pace(known.sums, self.fleet)

    def rounded_pace(self, target: Target, now: float) -> float:
        return math.exp(_ROUNDED * round(math.log(self.pace(target, now)) / _ROUNDED))

    def reported(self, worker_id: WorkerId, steps: Iterable[StepSums]) -> bool:
        """Take the sums over a worker's steps; return whether all paces have changed."""
        before = self.fleet
        for sums in steps:
            known = self._add(Target(worker_id, sums.rank), sums)
            if known is None:
                continue
            known.rates = _fit(known.sums)
            self._reports += 1
            # The fit goes through all targets, so not for every report of a large fleet.
            if _REPORTS_A_FIT * self._reports >= len(self._targets):
                self._fit_fleet()
        return self.fleet != before

    def drop(self, target: Target) -> None:
        self._targets.pop(target, None)

    def first_token_ms(
        self, target: Target, load: TargetLoad, work: Work, now: float
    ) -> float | None:
        """Predict the milliseconds to the first token; None if too few steps are known."""
        if not self.known:
            return None
        tokens = load.prefill_tokens + work.prefill_tokens + work.media_tokens
        return self.pace(target, now) * self.fleet.ms(1, tokens) + self._overhead_ms

    def first_token_came(self, expected_ms: float, after_ms: float) -> None:
        """Learn the overhead outside the engine from a first token."""
        # Bound the error by the expectation: anything may delay a single request.
        error = min(after_ms - expected_ms, expected_ms)
        overhead_ms = self._overhead_ms + _OVERHEAD_PACE * error
        self._overhead_ms = min(max(overhead_ms, 0.0), _MAX_OVERHEAD_MS)

    def _add(self, target: Target, report: StepSums) -> _Known | None:
        sums = msgspec.structs.astuple(report)[1:]
        known = self._targets.get(target)
        if known is None or any(map(operator.lt, sums, known.last)):
            # The report covers all steps before this frontend started, or since the engine
            # restarted.
            known = self._targets[target] = _Known()
        new = [told - before for told, before in zip(sums, known.last, strict=True)]
        if not new[0]:
            return None
        now = self._clock()
        if _is_forgotten(known, now):
            known.sums = _NO_SUMS
        known.last, known.stepped = sums, now
        kept, counts = math.exp(-new[0] / MEMORY), min(1.0, MEMORY / new[0])
        known.sums = tuple(
            kept * old + counts * one for old, one in zip(known.sums, new, strict=True)
        )
        return known

    def _fit_fleet(self) -> None:
        self._reports = 0
        now = self._clock()
        told = [
            one
            for one in self._targets.values()
            if one.sums[0] >= _ENOUGH_OF_ONE and not _is_forgotten(one, now)
        ]
        if sum(one.sums[0] for one in told) >= ENOUGH_STEPS:
            self.known = True
            # The lower of two medians: in a fleet of two kinds one of them has pace 1.
            self.fleet = Rates(
                statistics.median_low(one.rates.step for one in told),
                statistics.median_low(one.rates.token for one in told),
            )


def _is_forgotten(known: _Known, now: float) -> bool:
    return now - known.stepped > FORGET_S


def _pace(sums: _Sums, expected: Rates) -> float:
    steps, tokens, _, ms, _ = sums
    trusted_ms = expected.ms(_TRUSTED_STEPS, 0)
    pace = (ms + trusted_ms) / (expected.ms(steps, tokens) + trusted_ms)
    return min(max(pace, _PACES[0]), _PACES[1])


def _fit(sums: _Sums) -> Rates:
    pace = _pace(sums, GUESS)
    step, token = pace * GUESS.step, pace * GUESS.token
    steps, tokens, squares, ms, products = sums
    half = _TRUSTED_STEPS / 2
    steps += _TRUSTED_STEPS
    tokens += half * _TRUSTED_TOKENS
    squares += half * _TRUSTED_TOKENS**2
    ms += half * (2 * step + token * _TRUSTED_TOKENS)
    products += half * _TRUSTED_TOKENS * (step + token * _TRUSTED_TOKENS)
    spread = steps * squares - tokens**2  # positive, unless there are no steps
    slope = (steps * products - tokens * ms) / spread if spread > 0.0 else token
    slope = min(max(slope, _FREEDOM[0] * token), _FREEDOM[1] * token)
    level = (ms - slope * tokens) / steps
    return Rates(min(max(level, _FREEDOM[0] * step), _FREEDOM[1] * step), slope)
