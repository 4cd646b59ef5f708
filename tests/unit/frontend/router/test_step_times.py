"""Rates are learned from sums of steps, per target, and no report can make them absurd."""

import random
from itertools import repeat

import pytest

from backend_worker.engine.step_counter import StepCounter
from common.identity import Target, WorkerId
from common.request_plane.step_sums import EngineSums, ShippingSums, StepSums
from frontend.router.selection.step_times import ENOUGH_STEPS, GUESS, StepTimes

A, B, C = (WorkerId(name) for name in "abc")


class Engine:
    """Steps that last as the rates say, give or take some noise."""

    def __init__(self, step: float, prefill: float, encode: float, decode: float) -> None:
        self.rates = step, prefill, encode, decode
        self.counter = StepCounter()
        self._random = random.Random(1)

    def run(self, steps: int, *, prompts: bool = True, pictures: bool = True) -> EngineSums:
        for _ in range(steps):
            kind, decode = self._random.random(), self._random.randrange(12)
            prefill = encode = 0
            if prompts and kind < 0.1:
                prefill, encode = 1100, 1024 if pictures else 0
            elif prompts and kind < 0.3:
                prefill = self._random.randrange(20, 200)
            step, per_prefill, per_encode, per_decode = self.rates
            ms = step + per_prefill * prefill + per_encode * encode + per_decode * decode
            self.counter.add(
                prefill=prefill,
                encode=encode,
                decode=decode,
                prompts=int(prefill > 0),
                waited_ms=max(0.0, ms + self._random.gauss(0, 0.02 * step)),
                since_last_ms=(),
            )
        return self.counter.sums(0)


def rates(times: StepTimes, worker_id: WorkerId) -> list[float]:
    return list(times.rates(Target(worker_id, 0))[:4])


def test_nothing_is_known_at_first() -> None:
    times = StepTimes()
    assert not times.known
    assert times.rates(Target(A, 0)) == times.fleet == GUESS


def test_rates_are_found() -> None:
    times = StepTimes()
    for _ in range(5):
        times.reported(A, [ENGINE.run(200)], None)
    assert times.known
    assert rates(times, A) == pytest.approx(list(ENGINE.rates), rel=0.15)


ENGINE = Engine(8.0, 0.05, 0.07, 0.2)


def test_unequal_workers_are_told_apart() -> None:
    times = StepTimes()
    fast, slow = Engine(8.0, 0.04, 0.06, 0.1), Engine(16.0, 0.08, 0.12, 0.2)
    for _ in range(5):
        times.reported(A, [fast.run(200)], None)
        times.reported(B, [slow.run(200)], None)
    for one, other in zip(rates(times, A), rates(times, B), strict=True):
        assert other == pytest.approx(2 * one, rel=0.2)
    # One that has said nothing is like the others.
    assert rates(times, A)[1] < rates(times, C)[1] < rates(times, B)[1]


def test_engines_a_hundred_times_as_slow() -> None:
    times = StepTimes()
    engine = Engine(400.0, 8.0, 12.0, 6.0)
    for _ in range(5):
        times.reported(A, [engine.run(100)], None)
    assert rates(times, A) == pytest.approx(list(engine.rates), rel=0.3)


def test_decoding_alone_makes_nobody_forget_what_prompts_cost() -> None:
    times = StepTimes()
    engine = Engine(8.0, 0.05, 0.07, 0.2)
    times.reported(A, [engine.run(1000)], None)
    before = rates(times, A)
    for _ in range(50):
        times.reported(A, [engine.run(1000, prompts=False)], None)
    assert rates(times, A) == pytest.approx(before, rel=0.1)


def test_a_worker_that_becomes_slower() -> None:
    times = StepTimes()
    engine = Engine(8.0, 0.04, 0.06, 0.1)
    for _ in range(10):
        times.reported(A, [engine.run(1000)], None)
    engine.rates = tuple(3 * one for one in engine.rates)  # type: ignore[assignment]
    for _ in range(20):
        times.reported(A, [engine.run(1000)], None)
    assert rates(times, A) == pytest.approx(list(engine.rates), rel=0.2)


def test_what_never_comes_apart_is_shared_out() -> None:
    """Every prompt a picture: only the sum of both rates can be known, and each stays sensible."""
    times = StepTimes()
    counter = StepCounter()
    for number in range(500):
        counter.add(prefill=1000, encode=1000, decode=number % 5, prompts=1, waited_ms=108.0,
                    since_last_ms=())  # fmt: skip
    times.reported(A, [counter.sums(0)], None)
    step, prefill, encode, _ = rates(times, A)
    assert step + 1000 * (prefill + encode) == pytest.approx(108.0, rel=0.02)
    assert 0.02 < prefill < 0.08 and 0.02 < encode < 0.08


def test_sums_that_shrank_are_those_of_an_engine_that_began_anew() -> None:
    times = StepTimes()
    times.reported(A, [Engine(8.0, 0.04, 0.06, 0.1).run(3000)], None)
    again = Engine(80.0, 0.4, 0.6, 1.0)
    times.reported(A, [again.run(500)], None)
    assert rates(times, A) == pytest.approx(list(again.rates), rel=0.3)


def test_a_report_that_is_repeated_says_nothing_new() -> None:
    times = StepTimes()
    sums = Engine(8.0, 0.04, 0.06, 0.1).run(300)
    times.reported(A, [sums], None)
    before, answer = rates(times, A), times.answer_tokens
    for _ in range(100):
        times.reported(A, [sums], None)
    assert rates(times, A) == before and times.answer_tokens == answer


def test_who_is_gone_is_forgotten() -> None:
    times = StepTimes()
    times.reported(A, [Engine(80.0, 0.4, 0.6, 1.0).run(500)], ShippingSums(1 << 30, 9000.0))
    times.drop(Target(A, 0))
    times.drop(Target(A, 0))
    times.reported(B, [Engine(8.0, 0.04, 0.06, 0.1).run(500)], None)
    assert rates(times, A)[0] < 20


def test_the_length_of_answers() -> None:
    times = StepTimes()
    counter = StepCounter()
    for _ in range(500):
        counter.add(prefill=100, encode=0, decode=1, prompts=1, waited_ms=9.0, since_last_ms=())
        for _ in range(9):
            counter.add(prefill=0, encode=0, decode=1, prompts=0, waited_ms=8.0, since_last_ms=())
    times.reported(A, [counter.sums(0)], None)
    assert times.answer_tokens == pytest.approx(10, rel=0.1)


def test_shipping_is_learned() -> None:
    times = StepTimes()
    nbytes, ms = 0, 0.0
    for _ in range(100):
        nbytes, ms = nbytes + (64 << 20), ms + 64 * 5.0
        times.reported(A, [], ShippingSums(nbytes, ms))
    assert times.rates(Target(A, 0)).ship == pytest.approx(5.0, rel=0.1)
    times.reported(A, [], ShippingSums(0, 0.0))  # it began anew
    assert times.rates(Target(A, 0)).ship == pytest.approx(5.0, rel=0.1)


ODD = (0.0, 1e-9, 1.0, 1e3, 1e9, 1e18)


def test_no_report_makes_rates_absurd() -> None:
    """Any sums that the wire lets through, consistent or not."""
    draw = random.Random(7)
    for _ in range(300):
        times = StepTimes()
        for worker_id in (A, B):
            for _ in range(3):
                kinds = [
                    StepSums(*(draw.choice(ODD) for _ in repeat(None, 14))) for _ in repeat(None, 3)
                ]
                sums = EngineSums(0, draw.choice(ODD), *kinds)
                shipping = ShippingSums(draw.choice(ODD), draw.choice(ODD))
                times.reported(worker_id, [sums], shipping)
        for worker_id in (A, B, C):
            for rate, guess in zip(times.rates(Target(worker_id, 0)), GUESS, strict=True):
                assert 0.0 < rate <= 1e15 * guess
        assert 0.0 <= times.answer_tokens <= 1e5


def test_a_worker_that_lies_spoils_nobody_else_s_rates() -> None:
    times = StepTimes()
    honest = {WorkerId(name): Engine(8.0, 0.04, 0.06, 0.1) for name in "abcd"}
    liar = WorkerId("liar")
    for number in range(1, 6):
        for worker_id, engine in honest.items():
            times.reported(worker_id, [engine.run(200)], None)
        big = StepSums(1e3 * number, *(1e17 * number for _ in repeat(None, 13)))
        times.reported(liar, [EngineSums(0, 1e17 * number, big, big, big)], None)
    for worker_id, engine in honest.items():
        assert rates(times, worker_id) == pytest.approx(list(engine.rates), rel=0.2)


def test_little_is_not_enough() -> None:
    times = StepTimes()
    counter = StepCounter()
    counter.add(prefill=100, encode=0, decode=0, prompts=1, waited_ms=500.0, since_last_ms=())
    times.reported(A, [counter.sums(0)], None)
    assert not times.known and ENOUGH_STEPS > 1
