"""Rates are learned from sums of steps, per target, and no report can make them absurd."""

import random
from itertools import repeat

import pytest

from common.identity import Target, WorkerId
from common.request_plane.step_sums import StepSums
from frontend.router.selection.costs import Work
from frontend.router.selection.load import TargetLoad
from frontend.router.selection.step_times import ENOUGH_STEPS, FORGET_S, GUESS, StepTimes

A, B, C = (WorkerId(name) for name in "abc")
IDLE = TargetLoad(0, 0, 0, 0)


class Engine:
    """Steps that last as the rates say, give or take some noise."""

    def __init__(self, step: float, token: float) -> None:
        self.rates = step, token
        self.sums = StepSums(0)
        self._random = random.Random(1)

    def run(self, steps: int, tokens: int | None = None) -> StepSums:
        step, per_token = self.rates
        for _ in range(steps):
            count = self._random.choice((30, 200, 2124)) if tokens is None else tokens
            ms = step + per_token * count + self._random.gauss(0, 0.02 * step)
            self.sums = self.sums.plus(count, max(ms, 0.0))
        return self.sums


def pace(times: StepTimes, worker_id: WorkerId) -> float:
    return times.pace(Target(worker_id, 0), times._clock())


def rounded(times: StepTimes, *worker_ids: WorkerId) -> list[float]:
    return [times.rounded_pace(Target(one, 0), times._clock()) for one in worker_ids]


def learned(**engines: Engine) -> StepTimes:
    times = StepTimes()
    for _ in range(5):
        for name, engine in engines.items():
            times.reported(WorkerId(name), [engine.run(200)])
    return times


def test_nothing_is_known_at_first() -> None:
    times = StepTimes()
    assert not times.known and times.fleet == GUESS
    assert pace(times, A) == 1.0 and rounded(times, A) == [1.0]
    assert times.first_token_ms(Target(A, 0), IDLE, Work(0, 9, 0, 0), times._clock()) is None


def test_rates_are_found() -> None:
    engine = Engine(8.0, 0.05)
    times = learned(a=engine)
    assert times.known
    assert times.fleet == pytest.approx(engine.rates, rel=0.05)
    assert pace(times, A) == pytest.approx(1.0, rel=0.02)


def test_unequal_workers_are_told_apart() -> None:
    times = learned(a=Engine(8.0, 0.04), b=Engine(16.0, 0.08))
    assert pace(times, A) == pytest.approx(1.0, rel=0.02)
    assert pace(times, B) == pytest.approx(2.0, rel=0.02)
    # Equal to the fleet where nothing was said.
    assert rounded(times, A, B, C) == [1.0, pytest.approx(1.25**3), 1.0]


def test_workers_that_differ_by_noise_are_equal() -> None:
    times = learned(a=Engine(8.0, 0.04), b=Engine(8.4, 0.042), c=Engine(7.6, 0.038))
    assert rounded(times, A, B, C) == [1.0, 1.0, 1.0]


def test_engines_a_hundred_times_as_slow() -> None:
    engine = Engine(400.0, 8.0)
    assert learned(a=engine).fleet == pytest.approx(engine.rates, rel=0.1)


def test_a_worker_that_becomes_slower() -> None:
    engine = Engine(8.0, 0.04)
    times = learned(a=Engine(8.0, 0.04), b=engine, c=Engine(8.0, 0.04))
    engine.rates = 24.0, 0.12
    for _ in range(8):
        times.reported(B, [engine.run(1000)])
    assert pace(times, B) == pytest.approx(3.0, rel=0.05)
    assert pace(times, A) == pytest.approx(1.0, rel=0.02)


def test_prompts_of_one_length() -> None:
    """Step and token can't be told apart, but how slow a worker is can."""
    times = StepTimes()
    for name, slower in ((A, 1.0), (B, 2.0)):
        times.reported(name, [Engine(8.0 * slower, 0.05 * slower).run(500, tokens=2000)])
    assert times.fleet.ms(1, 2000) == pytest.approx(108.0, rel=0.02)
    assert pace(times, B) == pytest.approx(2.0, rel=0.02)


def test_a_few_steps_tell_who_is_slow() -> None:
    times = learned(a=Engine(8.0, 0.04))
    times.reported(B, [Engine(16.0, 0.08).run(5, tokens=150)])
    assert rounded(times, B)[0] > 1.5


def test_a_worker_that_says_no_more_is_compared_with_the_fleet_as_it_is_now() -> None:
    times = StepTimes()
    times.reported(B, [Engine(80.0, 0.4).run(10)])
    engine = Engine(80.0, 0.4)
    told = [times.reported(A, [engine.run(100)]) for _ in range(5)]
    assert any(told) and rounded(times, A, B) == [1.0, 1.0]


def test_sums_that_shrank_are_those_of_an_engine_that_began_anew() -> None:
    times = StepTimes()
    times.reported(A, [Engine(8.0, 0.04).run(3000)])
    again = Engine(80.0, 0.4)
    times.reported(A, [again.run(500)])
    assert times.fleet == pytest.approx(again.rates, rel=0.1)


def test_a_report_that_is_repeated_says_nothing_new() -> None:
    times = StepTimes()
    sums = Engine(8.0, 0.04).run(300)
    times.reported(A, [sums])
    before = pace(times, A), times.fleet
    for _ in range(100):
        times.reported(A, [sums])
    assert (pace(times, A), times.fleet) == before


def test_a_target_without_steps_for_a_while_is_given_another_chance() -> None:
    now = 0.0
    times = StepTimes(lambda: now)
    times.reported(A, [Engine(8.0, 0.04).run(500)])
    cold = Engine(40.0, 0.2)
    times.reported(B, [cold.run(10)])
    now = FORGET_S
    assert rounded(times, B)[0] > 3.0
    now += 1.0
    assert rounded(times, B) == [1.0]
    cold.rates = 8.0, 0.04
    times.reported(A, [Engine(8.0, 0.04).run(1000)])
    times.reported(B, [cold.run(3)])
    assert pace(times, B) == pytest.approx(1.0, rel=0.05)


def test_who_is_gone_is_forgotten() -> None:
    times = learned(a=Engine(8.0, 0.04), b=Engine(16.0, 0.08))
    times.drop(Target(B, 0))
    times.drop(Target(B, 0))
    assert pace(times, B) == 1.0


def test_a_first_token_waits_for_all_prompts_before_it() -> None:
    times = learned(a=Engine(10.0, 0.1))
    busy = TargetLoad(3, 0, 400, 5000)
    expected = times.first_token_ms(Target(A, 0), busy, Work(2, 300, 200, 1 << 20), times._clock())
    assert expected == pytest.approx(10.0 + 0.1 * (400 + 300 + 200), rel=0.1)


ODD = (0.0, 1e-9, 1.0, 1e3, 1e9, 1e18)


def test_no_report_makes_rates_absurd() -> None:
    """Any sums that the wire lets through, consistent or not."""
    draw = random.Random(7)
    for _ in range(300):
        times = StepTimes()
        for worker_id in (A, B):
            for _ in range(3):
                sums = StepSums(0, *(draw.choice(ODD) for _ in repeat(None, 5)))
                times.reported(worker_id, [sums])
        for rate, guess in zip(times.fleet, GUESS, strict=True):
            assert 0.0 < rate <= 1e8 * guess
        for paced in (*rounded(times, A, B, C), *(pace(times, one) for one in (A, B, C))):
            assert 1e-4 < paced <= 1e7


def test_a_worker_that_lies_spoils_nobody_else_s_rates() -> None:
    times = StepTimes()
    honest = {WorkerId(name): Engine(8.0, 0.04) for name in "abcd"}
    for number in range(1, 6):
        for worker_id, engine in honest.items():
            times.reported(worker_id, [engine.run(200)])
        big = StepSums(0, 1e3 * number, *(1e17 * number for _ in repeat(None, 4)))
        times.reported(WorkerId("liar"), [big])
    assert times.fleet == pytest.approx((8.0, 0.04), rel=0.1)
    assert rounded(times, *honest) == [1.0] * 4


def test_little_is_not_enough() -> None:
    times = StepTimes()
    times.reported(A, [StepSums(0).plus(100, 500.0)])
    assert not times.known and ENOUGH_STEPS > 1
    assert pace(times, A) == 1.0
