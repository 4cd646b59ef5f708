"""How long each target's steps take, learned from what workers report. No I/O, no clock.

A step of an engine is taken to last::

    step + prefill * prompt tokens prefilled + encode * media tokens encoded
         + decode * requests decoding                                          milliseconds

The four rates of a target are fitted by least squares to its own steps, each rate held to the
fleet's with the weight of a few steps, so that a target of which little is known counts as the
others do. What they are held to is first made longer or shorter by one factor, so that it gives
the length of all steps together: of two kinds of GPU mostly the speed differs. The fleet's rates
are the medians of what each target's steps say alone, held to a guess in the same way. (Steps of
unequal targets in one fit would be noise to each other.) What is never seen apart, such as pictures
and their prompt tokens, is shared out as the guess has it.

Evidence fades: the steps of each kind (those that encode, others that prefill, others that only
decode) by the number of newer ones of that kind, so that an hour of decoding makes nobody forget
what a prompt costs. Rates are never negative, nor far from what they are held to, whatever is
reported.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from common.identity import Target, WorkerId
from common.request_plane.step_sums import EngineSums, ShippingSums, StepSums


class Rates(NamedTuple):
    """What work takes, in milliseconds.

    Attributes:
        step: any step.
        prefill: a prompt token prefilled.
        encode: a media token encoded.
        decode: a request that decodes, in each step.
        ship: a MiB of media tensors to arrive.
    """

    step: float
    prefill: float
    encode: float
    decode: float
    ship: float


GUESS: Final = Rates(step=8.0, prefill=0.04, encode=0.04, decode=0.04, ship=0.32)
"""Of a model of seven billion parameters on one H100, in the proportions of the settings' weights.
Nothing is decided by it before there are steps to fit; then it weighs less than a few of them."""

MEMORY: Final = 1000.0
"""Steps of a kind after which evidence counts for a third."""

PROMPT_MEMORY: Final = 300.0
"""Prompts after which the length of answers counts for a third."""

SHIP_MEMORY_MIB: Final = 1024.0

ENOUGH_STEPS: Final = 20.0
"""Steps with prompt tokens, of the whole fleet, from which on it is known what they take."""

_ENOUGH_OF_ONE: Final = 3.0
"""Those of one target from which on it counts for the fleet's."""

_SPEEDS: Final = (1e-3, 1e6)
"""By which factor steps may be longer than expected."""

_FREEDOM: Final = (0.05, 20.0)
"""How many times that which it is held to a rate may be."""

_TRUSTED_STEPS: Final = 10.0
"""Steps as which the expected speed counts."""

_NOISE: Final = 0.1
"""How far a step is expected to be from what was fitted, as a share of the average step."""

_GUESSED_ANSWERS: Final = 4.0
"""Prompts as whose answers the guess of their length counts."""

_GUESSED_TOKENS: Final = 64.0

_LONGEST_ANSWER: Final = 1e5

_GUESSED_MIB: Final = 16.0

_REPORTS_A_FIT: Final = 4
"""Times that the fleet's rates are fitted while every target reports once, at most."""

_MIB: Final = 1 << 20

_Vector: TypeAlias = list[float]


class _Evidence:
    """The normal equations of some steps: a 4 by 4 matrix and a vector."""

    __slots__ = ("matrix", "ms", "products", "steps")

    def __init__(self) -> None:
        self.steps = self.ms = 0.0
        self.matrix = [[0.0] * 4 for _ in range(4)]
        self.products = [0.0] * 4

    def add(self, one: StepSums, weight: float = 1.0) -> None:
        """Steps count besides, or less from now on."""
        rows = (
            (one.steps, one.prefill, one.encode, one.decode),
            (one.prefill, one.prefill_prefill, one.prefill_encode, one.prefill_decode),
            (one.encode, one.prefill_encode, one.encode_encode, one.encode_decode),
            (one.decode, one.prefill_decode, one.encode_decode, one.decode_decode),
        )
        for mine, row in zip(self.matrix, rows, strict=True):
            for column, value in enumerate(row):
                mine[column] += weight * value
        products = (one.ms, one.prefill_ms, one.encode_ms, one.decode_ms)
        for row_number, value in enumerate(products):
            self.products[row_number] += weight * value
        self.steps += weight * one.steps
        self.ms += weight * one.ms

    def fade(self, factor: float) -> None:
        """All of it counts less."""
        self.matrix = [[factor * value for value in row] for row in self.matrix]
        self.products = [factor * value for value in self.products]
        self.steps *= factor
        self.ms *= factor

    def merge(self, other: "_Evidence") -> None:
        """That of others counts besides."""
        for mine, theirs in zip(self.matrix, other.matrix, strict=True):
            for column, value in enumerate(theirs):
                mine[column] += value
        self.products = [a + b for a, b in zip(self.products, other.products, strict=True)]
        self.steps += other.steps
        self.ms += other.ms


def _fit(evidence: _Evidence, expected: _Vector) -> _Vector:
    """The rates that fit best, within bounds.

    Args:
        expected: rates that count as a few steps besides, once they have the right speed.
    """
    if not evidence.steps:
        return expected
    features = evidence.matrix[0]
    trusted = _TRUSTED_STEPS * expected[0]
    expected_ms = sum(count * rate for count, rate in zip(features, expected, strict=True))
    slower = (evidence.ms + trusted) / (expected_ms + trusted)
    slower = min(max(slower, _SPEEDS[0]), _SPEEDS[1])
    held_to = [slower * rate for rate in expected]
    noise = max(_NOISE * evidence.ms / evidence.steps, 1e-6)
    trust = [(noise / rate) ** 2 for rate in held_to]
    matrix = [
        [value + (trust[r] if r == c else 0.0) for c, value in enumerate(row)]
        for r, row in enumerate(evidence.matrix)
    ]
    products = [a + t * h for a, t, h in zip(evidence.products, trust, held_to, strict=True)]
    least, most = ([times * rate for rate in held_to] for times in _FREEDOM)
    fixed: dict[int, float] = {}
    while True:
        found = _solve(matrix, products, fixed)
        if found is None:
            return held_to
        outside = {
            number: bound
            for number, value in enumerate(found)
            if number not in fixed
            and (bound := min(max(value, least[number]), most[number])) != value
        }
        if not outside:
            return found
        # Those that are held at a bound, then the others anew, since they must make up for it.
        fixed |= outside


def _solve(matrix: Sequence[_Vector], products: _Vector, fixed: dict[int, float]) -> _Vector | None:
    """Solve linear equations for what is not fixed; None where they say nothing."""
    free = [number for number in range(len(products)) if number not in fixed]
    rows = [
        [matrix[r][c] for c in free]
        + [products[r] - sum(matrix[r][c] * value for c, value in fixed.items())]
        for r in free
    ]
    for number, row in enumerate(rows):
        # Without exchanging rows: a matrix of sums of squares needs none, and what is none
        # was not measured by anybody.
        pivot = row[number]
        if not (pivot > 0.0 and math.isfinite(pivot)):
            return None
        for other in rows:
            if other is not row:
                factor = other[number] / pivot
                for column in range(number, len(row)):
                    other[column] -= factor * row[column]
    solution = dict(fixed)
    for number, (one, row) in enumerate(zip(free, rows, strict=True)):
        solution[one] = row[-1] / row[number]
    values = [solution[number] for number in range(len(products))]
    return values if all(map(math.isfinite, values)) else None


class _Known:
    """What a target reported."""

    __slots__ = ("alone", "evidence", "kinds", "last", "rates")

    def __init__(self, last: EngineSums, rates: _Vector) -> None:
        self.last = last
        self.kinds = [_Evidence() for _ in last.kinds]
        self.evidence = _Evidence()
        self.rates = self.alone = rates

    @property
    def prompting(self) -> float:
        """Steps with prompt tokens."""
        return sum(one.steps for one in self.kinds[1:])


class StepTimes:
    """The rates of all targets.

    Attributes:
        answer_tokens: of an answer, on average.
    """

    def __init__(self) -> None:
        self._targets: dict[Target, _Known] = {}
        self._ship: dict[WorkerId, tuple[ShippingSums, float, float]] = {}
        self._fleet, self._fleet_ship = list(GUESS[:4]), GUESS.ship
        self._reports = 0
        self._enough = False
        self._prompts, self._tokens = _GUESSED_ANSWERS, _GUESSED_ANSWERS * _GUESSED_TOKENS
        self._rates: dict[Target, Rates] = {}

    @property
    def known(self) -> bool:
        """Whether there is enough to go by."""
        return self._enough

    @property
    def answer_tokens(self) -> float:
        """Of an answer, on average."""
        return min(self._tokens / self._prompts, _LONGEST_ANSWER)

    @property
    def fleet(self) -> Rates:
        """Of all targets together."""
        return _rates(self._fleet, self._fleet_ship)

    def rates(self, target: Target) -> Rates:
        """Of one target; those of the fleet if it has reported nothing."""
        found = self._rates.get(target)
        if found is None:
            known = self._targets.get(target)
            _, mib, ms = self._ship.get(target.worker_id, (None, 0.0, 0.0))
            four = self._fleet if known is None else known.rates
            found = _rates(four, _ship_rate(mib, ms, self._fleet_ship))
            self._rates[target] = found
        return found

    def reported(
        self, worker_id: WorkerId, steps: Iterable[EngineSums], shipping: ShippingSums | None
    ) -> None:
        """What a worker's steps add up to by now."""
        if shipping is not None:
            self._shipped(worker_id, shipping)
        for sums in steps:
            target = Target(worker_id, sums.rank)
            known = self._add(target, sums)
            if known is None:
                continue
            known.alone = _fit(known.evidence, list(GUESS[:4]))
            self._reports += 1
            # All targets are gone through, so not for every report of a large fleet.
            if _REPORTS_A_FIT * self._reports >= len(self._targets):
                self._average()
            known.rates = _fit(known.evidence, self._fleet)
            self._rates.pop(target, None)

    def drop(self, target: Target) -> None:
        """It is gone; another under its name begins anew."""
        self._targets.pop(target, None)
        self._ship.pop(target.worker_id, None)
        self._rates.clear()

    def _add(self, target: Target, sums: EngineSums) -> _Known | None:
        """Count what is new; None if nothing is."""
        known = self._targets.get(target)
        if known is None or not _since(known.last, sums):
            # All that its engine did, for others too, before we came.
            known = self._targets[target] = _Known(EngineSums(sums.rank), list(self._fleet))
        new = [_less(now, then) for now, then in zip(sums.kinds, known.last.kinds, strict=True)]
        if not any(one.steps for one in new):
            return None
        prompts = sums.prompts - known.last.prompts
        known.last = sums
        for evidence, one in zip(known.kinds, new, strict=True):
            if one.steps:
                evidence.fade(math.exp(-one.steps / MEMORY))
                evidence.add(one, min(1.0, MEMORY / one.steps))
        known.evidence = _Evidence()
        for evidence in known.kinds:
            known.evidence.merge(evidence)
        faded = math.exp(-prompts / PROMPT_MEMORY)
        self._prompts = faded * self._prompts + prompts
        self._tokens = faded * self._tokens + sum(one.decode for one in new)
        self._prompts = max(self._prompts, 1e-3)
        return known

    def _average(self) -> None:
        """Find the fleet's rates anew."""
        self._reports = 0
        self._rates.clear()
        told = [one for one in self._targets.values() if one.prompting >= _ENOUGH_OF_ONE]
        if sum(one.prompting for one in told) >= ENOUGH_STEPS:
            self._enough = True
            columns = zip(*(one.alone for one in told), strict=True)
            self._fleet = [statistics.median(column) for column in columns]
        mib = sum(mib for _, mib, _ in self._ship.values())
        ms = sum(ms for _, _, ms in self._ship.values())
        self._fleet_ship = _ship_rate(mib, ms, GUESS.ship)

    def _shipped(self, worker_id: WorkerId, sums: ShippingSums) -> None:
        last, mib, ms = self._ship.get(worker_id, (sums, 0.0, 0.0))
        new_bytes, new_ms = sums.nbytes - last.nbytes, sums.ms - last.ms
        if new_bytes >= 0.0 and new_ms >= 0.0:
            faded = math.exp(-new_bytes / _MIB / SHIP_MEMORY_MIB)
            mib, ms = faded * mib + new_bytes / _MIB, faded * ms + new_ms
        self._ship[worker_id] = sums, mib, ms


def _rates(fitted: _Vector, ship: float) -> Rates:
    step, prefill, encode, decode = fitted
    return Rates(step, prefill, encode, decode, ship)


def _ship_rate(mib: float, ms: float, held_to: float) -> float:
    """Milliseconds per MiB; bounded as the others are."""
    rate = (ms + _GUESSED_MIB * held_to) / (mib + _GUESSED_MIB)
    return min(rate, _SPEEDS[1] * GUESS.ship)


def _since(then: EngineSums, now: EngineSums) -> bool:
    """Whether sums only grew, as they do unless the engine began anew."""
    pairs = zip(then.kinds, now.kinds, strict=True)
    return now.prompts >= then.prompts and all(
        new >= old
        for before, after in pairs
        for old, new in zip(
            msgspec.structs.astuple(before), msgspec.structs.astuple(after), strict=True
        )
    )


def _less(now: StepSums, then: StepSums) -> StepSums:
    pairs = zip(msgspec.structs.astuple(now), msgspec.structs.astuple(then), strict=True)
    return StepSums(*(new - old for new, old in pairs))
