"""Costs follow each worker's learned pace, and every decision shows when its first token is due."""

import json
from typing import Any

import pytest

from common.identity import WorkerId
from common.request_plane.step_sums import StepSums
from frontend.router import Router, RouterSettings
from frontend.router.selection import parts_of_cost
from tests.fakes.reports import rank_report
from tests.fakes.routing import Clock, image, prompt, request, worker

A, B = WorkerId("a"), WorkerId("b")


def step_sums(slower: float = 1.0) -> StepSums:
    sums = StepSums(0)
    for number in range(200):
        tokens = (1900, 50, 300)[number % 3]
        sums = sums.plus(tokens, slower * (8 + 0.05 * tokens))
    return sums


async def router_of(clock: Clock, *, learned: bool = True, **settings: Any) -> Router:
    router = Router(RouterSettings.model_validate(settings), clock=clock, seed=1)
    for name, slower in (("a", 1.0), ("b", 2.0)):
        await router.roster.add(worker(name))
        if learned:
            router.roster.stepped(WorkerId(name), [step_sums(slower)])
    return router


async def test_an_idle_fleet_prefers_the_faster_worker() -> None:
    router = await router_of(Clock())
    for seed in range(5):
        one = request(prompt(seed))
        assert router.route(one).worker_id == "a"
        router.in_flight.finished(one.request_id, served=True)
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
    decision = router.route(one)
    expected = 8 + 0.05 * (1024 + 900)
    assert decision.predicted_first_token_s == pytest.approx(expected / 1e3, rel=0.1)
    clock.now += 0.2
    router.in_flight.first_token(one.request_id)
    (shown,) = [each.as_json() for each in router.decisions.find("mine")]
    shown = json.loads(json.dumps(shown))
    assert shown["first_token_s"] == pytest.approx(0.2)
    for candidate in shown["candidates"]:
        assert candidate["cost"] == pytest.approx(sum(candidate["costs"].values()))
    first, second = (each["first_token_s"] for each in shown["candidates"])
    assert first == pytest.approx(shown["predicted_first_token_s"]) and second > 1.5 * first
    await router.close()


async def test_what_first_tokens_take_besides_is_learned() -> None:
    clock = Clock()
    router = await router_of(clock)
    for number in range(200):
        one = request(prompt(number))
        expected = router.route(one).predicted_first_token_s
        assert expected is not None
        clock.now += 0.064
        router.in_flight.first_token(one.request_id)
        router.in_flight.finished(one.request_id, served=True)
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
        router.in_flight.finished(one.request_id, served=True)
    assert 0 <= (decision.predicted_first_token_s or -1) <= 20
    await router.close()


async def test_the_terms_of_a_cost() -> None:
    router = await router_of(Clock(), learned=False)
    router.load.reported(
        A, [rank_report(active=2, waiting=1, prefill_tokens=100, decode_tokens=80)]
    )
    decision = router.route(request(prompt(1)))
    assert decision.worker_id == "b"
    cost = {each.target.worker_id: each.cost for each in decision.considered}
    assert cost == {"a": 128 + 0.5 * 100 + 0.05 * 80 + 512 + 100, "b": 128}
    await router.close()


async def test_the_pace_multiplies_all_terms() -> None:
    router = await router_of(Clock())
    for worker_id in (A, B):
        router.load.reported(
            worker_id, [rank_report(active=2, waiting=1, prefill_tokens=100, decode_tokens=80)]
        )
    a, b = router.route(request(prompt(1), media=[image("x")])).considered
    assert (a.target.worker_id, b.target.worker_id) == (A, B)
    assert b.cost == pytest.approx(2 * a.cost, rel=0.12)
    for each in (a, b):
        assert each.cost == pytest.approx(sum(parts_of_cost(each.work, each.load, each.pace)))
    await router.close()


async def test_costs_are_finite_whatever_is_reported() -> None:
    router = await router_of(Clock())
    for number in range(1, 4):
        router.roster.stepped(A, [StepSums(0, *[1e18 * number / 3] * 5)])
    decision = router.route(request(prompt(1), media=[image("x")]))
    assert all(0 <= each.cost < 1e30 for each in decision.considered)
    await router.close()


async def test_a_worker_that_comes_back_begins_anew() -> None:
    router = await router_of(Clock())
    for worker_id in (A, B):
        await router.roster.remove(worker_id)
        await router.roster.add(worker(worker_id))
    costs = {each.cost for each in router.route(request(prompt(1))).considered}
    assert costs == {128.0}
    await router.close()
