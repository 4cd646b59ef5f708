"""Modes choose as their names say, and costs add up as documented."""

from collections import Counter

import pytest

from common.identity import Target, WorkerId
from frontend.router.modes import Choice, RouterMode
from frontend.router.selection.load import TargetLoad
from frontend.router.selection.selector import Costs, Selector, Weights, Work
from frontend.router.settings import RouterSettings

TARGETS = [Target(WorkerId(name), 0) for name in "abcd"]
IDLE = TargetLoad(0, 0, 0, 0)
BUSY = TargetLoad(5, 0, 1000, 0)


def selector(mode: RouterMode = RouterMode.KV, /, **fields: float) -> Selector:
    return Selector(RouterSettings.model_validate({"mode": mode, **fields}), Weights(), seed=1)


def choose(
    chooser: Selector,
    costs: list[float],
    loads: list[TargetLoad] | None = None,
    slots: list[int] | None = None,
    prompt_tokens: int = 1000,
) -> Choice:
    count = len(costs)
    return chooser.choose(
        TARGETS[:count], costs, loads or [IDLE] * count, slots or [0] * count, prompt_tokens
    )


def test_the_cost_of_work() -> None:
    work = Work(overlap_blocks=9, prefill_tokens=100, media_tokens=10, ship_bytes=2 << 20)
    assert Weights().of_work(work) == 100 + 10 + 8 * 2
    assert Weights(prefill=2.0).of_work(work) == 2 * 100 + 10 + 8 * 2


def test_the_cost_of_load() -> None:
    load = TargetLoad(active=3, waiting=2, prefill_tokens=100, decode_tokens=40)
    assert Weights().of_load(load) == 0.5 * 100 + 0.05 * 40 + 512 * 2 + 100
    assert Weights().of_load(IDLE) == 0


def test_the_parts_of_a_cost() -> None:
    work = Work(overlap_blocks=9, prefill_tokens=100, media_tokens=10, ship_bytes=2 << 20)
    load = TargetLoad(active=3, waiting=2, prefill_tokens=100, decode_tokens=40)
    assert Weights(decode=0.5).costs(work, load, 3.0) == Costs(300, 30, 48, 150, 60, 3072, 300)
    assert Weights().costs(work, IDLE, 1.0).step == 0


def test_the_cheapest_is_chosen() -> None:
    assert choose(selector(), [3.0, 1.0, 2.0]) == (1, "cost")


def test_ties_are_broken_at_random() -> None:
    chooser = selector()
    chosen = Counter(choose(chooser, [1.0, 2.0, 1.0]).position for _ in range(200))
    assert chosen[1] == 0
    assert min(chosen[0], chosen[2]) > 50


def test_a_single_candidate() -> None:
    for mode in RouterMode:
        assert choose(selector(mode), [9.0]) == (0, "only-worker")


def test_round_robin() -> None:
    chooser = selector(RouterMode.ROUND_ROBIN)
    assert [choose(chooser, [9.0, 1.0, 1.0]).position for _ in range(5)] == [0, 1, 2, 0, 1]


def test_random_reaches_all() -> None:
    chooser = selector(RouterMode.RANDOM)
    assert {choose(chooser, [0.0, 9.0, 9.0]).position for _ in range(100)} == {0, 1, 2}


def test_power_of_two_never_takes_the_busiest() -> None:
    chooser = selector(RouterMode.POWER_OF_TWO)
    loads = [IDLE, BUSY, TargetLoad(1, 0, 0, 0)]
    chosen = Counter(choose(chooser, [9.0, 0.0, 9.0], loads).position for _ in range(200))
    assert chosen[1] == 0
    assert chosen[0] > chosen[2] > 0


def test_least_loaded_ignores_caches() -> None:
    chooser = selector(RouterMode.LEAST_LOADED)
    assert choose(chooser, [0.0, 9.0], [BUSY, IDLE]) == (1, "least-loaded")


def test_temperature_spreads_in_proportion_to_the_prompt() -> None:
    def share(temperature: float, prompt_tokens: int) -> float:
        chooser = selector(temperature=temperature)
        picks = [choose(chooser, [100.0, 200.0], prompt_tokens=prompt_tokens) for _ in range(2000)]
        assert {pick.reason for pick in picks} == {"sampled"}
        return sum(pick.position == 0 for pick in picks) / len(picks)

    # exp(-(200 - 100) / (0.1 * 1000)) against 1.
    assert share(0.1, 1000) == pytest.approx(0.731, abs=0.04)
    assert share(0.1, 10_000) == pytest.approx(0.525, abs=0.04)
    assert share(0.001, 1000) == 1.0


@pytest.mark.parametrize(
    ("load", "slots"),
    [(TargetLoad(3, 1, 0, 0), 0), (TargetLoad(8, 0, 0, 0), 8)],
    ids=["queue reported", "all slots taken"],
)
def test_an_idle_worker_is_preferred_to_a_queue(load: TargetLoad, slots: int) -> None:
    costs, loads = [1.0, 900.0, 500.0], [load, IDLE, IDLE]
    assert choose(selector(), costs, loads, [slots] * 3) == (2, "spread")


def test_no_spreading_while_the_worker_has_room_or_nobody_is_idle() -> None:
    costs = [1.0, 900.0]
    assert choose(selector(), costs, [TargetLoad(7, 0, 0, 0), IDLE], [8, 8]) == (0, "cost")
    assert choose(selector(), costs, [TargetLoad(8, 2, 0, 0), BUSY], [8, 8]) == (0, "cost")
