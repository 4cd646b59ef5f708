"""Modes choose as their names say, and costs add up as documented."""

import random
from collections import Counter

import pytest

from common.identity import Target, WorkerId
from frontend.router.modes import Choice, InTurn, LeastCost, RouterMode, Situation
from frontend.router.selection.costs import (
    Costs,
    Work,
    cost_of_load,
    cost_of_work,
    parts_of_cost,
)
from frontend.router.selection.load import TargetLoad
from tests.fakes.routing import prompt, request

TARGETS = [Target(WorkerId(name), 0) for name in "abcd"]
IDLE = TargetLoad(0, 0, 0, 0)
BUSY = TargetLoad(5, 0, 1000, 0)


def choose(
    mode: RouterMode,
    costs: list[float],
    loads: list[TargetLoad] | None = None,
    slots: list[int] | None = None,
    randoms: random.Random | None = None,
) -> Choice:
    count = len(costs)
    situation = Situation(
        request(prompt(1)),
        TARGETS[:count],
        costs,
        loads or [IDLE] * count,
        slots or [0] * count,
        randoms or random.Random(1),
    )
    return mode.choose(situation)


def test_the_cost_of_work() -> None:
    work = Work(overlap_blocks=9, prefill_tokens=100, media_tokens=10, ship_bytes=2 << 20)
    assert cost_of_work(work) == 100 + 10 + 8 * 2


def test_the_cost_of_load() -> None:
    load = TargetLoad(active=3, waiting=2, prefill_tokens=100, decode_tokens=40)
    assert cost_of_load(load) == 0.5 * 100 + 0.05 * 40 + 512 * 2 + 100
    assert cost_of_load(IDLE) == 0


def test_the_parts_of_a_cost() -> None:
    work = Work(overlap_blocks=9, prefill_tokens=100, media_tokens=10, ship_bytes=2 << 20)
    load = TargetLoad(active=3, waiting=2, prefill_tokens=100, decode_tokens=40)
    assert parts_of_cost(work, load, 4.0) == Costs(400, 40, 64, 200, 8, 4096, 400)
    assert parts_of_cost(work, IDLE, 1.0).step == 0


def test_the_cheapest_is_chosen() -> None:
    assert choose(LeastCost(), [3.0, 1.0, 2.0]) == (1, "cost")


def test_ties_are_broken_at_random() -> None:
    randoms = random.Random(1)
    mode = LeastCost()
    chosen = Counter(choose(mode, [1.0, 2.0, 1.0], randoms=randoms).position for _ in range(200))
    assert chosen[1] == 0
    assert min(chosen[0], chosen[2]) > 50


def test_round_robin() -> None:
    mode = InTurn()
    assert [choose(mode, [9.0, 1.0, 1.0]).position for _ in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("load", "slots"),
    [(TargetLoad(3, 1, 0, 0), 0), (TargetLoad(8, 0, 0, 0), 8)],
    ids=["queue reported", "all slots taken"],
)
def test_an_idle_worker_is_preferred_to_a_queue(load: TargetLoad, slots: int) -> None:
    costs, loads = [1.0, 900.0, 500.0], [load, IDLE, IDLE]
    assert choose(LeastCost(), costs, loads, [slots] * 3) == (2, "spread")


def test_no_spreading_while_the_worker_has_room_or_nobody_is_idle() -> None:
    costs = [1.0, 900.0]
    assert choose(LeastCost(), costs, [TargetLoad(7, 0, 0, 0), IDLE], [8, 8]) == (0, "cost")
    assert choose(LeastCost(), costs, [TargetLoad(8, 2, 0, 0), BUSY], [8, 8]) == (0, "cost")
