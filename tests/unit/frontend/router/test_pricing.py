"""Costs in time: learned, overridden by weights that are given, shown with every decision."""

import json
from itertools import repeat
from typing import Any

import pytest
from prometheus_client import REGISTRY

from backend_worker.engine.step_counter import StepCounter
from common.identity import WorkerId
from common.request_plane.step_sums import EngineSums
from frontend.router import Router, RouterSettings
from frontend.router.selection import Reported
from tests.fakes.routing import Clock, image, prompt, request, worker

A, B = WorkerId("a"), WorkerId("b")


def engine_sums(slower: float = 1.0) -> EngineSums:
    counter = StepCounter()
    for number in range(200):
        prefill, encode, decode = ((1000, 900, 3), (50, 0, 1), (0, 0, 5), (300, 0, 8))[number % 4]
        ms = slower * (8 + 0.04 * prefill + 0.06 * encode + 0.1 * decode)
        counter.add(prefill=prefill, encode=encode, decode=decode, prompts=int(prefill > 0),
                    waited_ms=ms, since_last_ms=())  # fmt: skip
    return counter.sums(0)


async def router_of(clock: Clock, *, learned: bool = True, **settings: Any) -> Router:
    given = {"costs": "time", **settings}
    router = Router(RouterSettings.model_validate(given), clock=clock, seed=1)
    for name, slower in (("a", 1.0), ("b", 2.0)):
        await router.roster.add(worker(name))
        if learned:
            router.roster.stepped(WorkerId(name), [engine_sums(slower)], None)
    return router


async def test_an_idle_fleet_prefers_the_faster_worker() -> None:
    router = await router_of(Clock())
    for seed in range(5):
        one = request(prompt(seed))
        assert router.route(one).worker_id == "a"
        router.in_flight.finished(one.request_id, 0)
    await router.close()


async def test_unequal_workers_get_unequal_shares() -> None:
    """Nothing ends, so it is what waits that decides: twice as much where it goes twice as fast."""
    router = await router_of(Clock())
    chosen = [router.route(request(prompt(seed, 64))).worker_id for seed in range(30)]
    assert 18 <= chosen.count(A) <= 22
    await router.close()


async def test_until_something_is_known_workers_are_equal() -> None:
    router = await router_of(Clock(), learned=False)
    decisions = [router.route(request(prompt(seed, 64))) for seed in range(30)]
    assert 14 <= [one.worker_id for one in decisions].count(A) <= 16
    assert all(one.predicted_first_token_s is None for one in decisions)
    await router.close()


async def test_a_decision_shows_what_was_expected_and_what_came() -> None:
    clock = Clock()
    router = await router_of(clock)
    one = request(prompt(1, 64), media=[image("x", 0, 900)], client_id="mine")
    errors = _errors()
    decision = router.route(one)
    expected = 8 + 0.04 * 1024 + 0.06 * 900
    assert decision.predicted_first_token_s == pytest.approx(expected / 1e3, rel=0.15)
    clock.now += 0.2
    router.in_flight.first_token(one.request_id)
    (shown,) = [each.as_json() for each in router.decisions.find("mine")]
    shown = json.loads(json.dumps(shown))
    assert shown["unit"] == "ms" and shown["first_token_s"] == pytest.approx(0.2)
    for candidate in shown["candidates"]:
        assert candidate["cost"] == pytest.approx(sum(candidate["costs"].values()))
    first, second = (each["first_token_s"] for each in shown["candidates"])
    assert first == pytest.approx(shown["predicted_first_token_s"]) and second > 1.5 * first
    assert _errors() == errors + 1
    await router.close()


def _errors() -> float:
    name = "mmrouter_first_token_error_seconds_count"
    return sum(REGISTRY.get_sample_value(name, {"side": side}) or 0 for side in ("late", "early"))


async def test_what_first_tokens_take_besides_is_learned() -> None:
    clock = Clock()
    router = await router_of(clock)
    for number in range(200):
        one = request(prompt(number))
        expected = router.route(one).predicted_first_token_s
        assert expected is not None
        clock.now += 0.064
        router.in_flight.first_token(one.request_id)
        router.in_flight.finished(one.request_id, 0)
    assert expected == pytest.approx(0.064, rel=0.1)
    await router.close()


@pytest.mark.parametrize("after_s", [0.0, 1e9])
async def test_first_tokens_at_odd_times_do_no_harm(after_s: float) -> None:
    clock = Clock()
    router = await router_of(clock)
    for number in range(300):
        one = request(prompt(number))
        decision = router.route(one)
        clock.now += after_s
        router.in_flight.first_token(one.request_id)
        router.in_flight.finished(one.request_id, 0)
    assert 0 <= (decision.predicted_first_token_s or -1) <= 20
    await router.close()


async def test_a_weight_that_is_given_is_not_learned() -> None:
    """In tokens as long as the fleet takes for one; the other terms stay learned."""
    clock = Clock()
    router = await router_of(clock, prefill_weight=2.0)
    decision = router.route(request(prompt(1)))
    costs = {each.worker_id: each.costs for each in decision.candidates}
    assert costs[A].prefill == pytest.approx(costs[B].prefill)
    assert costs[A].prefill == pytest.approx(2 * 128 * router.pricing.times.fleet.prefill)
    assert costs[B].step > 1.5 * costs[A].step
    await router.close()


async def test_tokens_are_as_before() -> None:
    clock = Clock()
    router = await router_of(clock, costs="tokens")
    router.load.reported(
        A, {0: Reported(active=2, waiting=1, prefill_tokens=100, decode_tokens=80)}
    )
    decision = router.route(request(prompt(1)))
    assert decision.worker_id == "b" and decision.as_json()["unit"] == "tokens"
    cost = {each.worker_id: each.cost for each in decision.candidates}
    assert cost == {"a": 128 + 0.5 * 100 + 0.05 * 80 + 512 + 100, "b": 128}
    # What is expected is shown all the same.
    assert decision.predicted_first_token_s is not None
    await router.close()


async def test_what_others_sent_is_waited_for() -> None:
    router = await router_of(Clock())
    router.load.reported(A, {0: Reported(active=5, prefill_tokens=20_000)})
    assert router.route(request(prompt(1))).worker_id == "b"
    await router.close()


async def test_costs_are_finite_whatever_is_reported() -> None:
    router = await router_of(Clock())
    for number in range(1, 4):
        huge = [1e18 * number / 3 for _ in repeat(None, 14)]
        sums = EngineSums(0, 1e18 * number / 3, *(type(engine_sums().decoding)(*huge),) * 3)
        router.roster.stepped(A, [sums], None)
    decision = router.route(request(prompt(1), media=[image("x")]))
    assert all(0 <= each.cost < 1e30 for each in decision.candidates)
    await router.close()


async def test_a_worker_that_comes_back_begins_anew() -> None:
    clock = Clock()
    router = await router_of(clock)
    running = [request(prompt(seed, 64)) for seed in range(9)]
    for one in running:
        router.route(one)
    for worker_id in (A, B):
        await router.roster.remove(worker_id)
        await router.roster.add(worker(worker_id))
    for one in running:  # those of before end late
        router.in_flight.first_token(one.request_id)
        router.in_flight.finished(one.request_id, 0)
    for target in router.roster.targets():
        assert router.pricing.backlog.count(target) == 0
        assert router.load.load(target).active == 0
    assert router.pricing.backlog.waits(clock(), in_time=True) == []
    await router.close()
