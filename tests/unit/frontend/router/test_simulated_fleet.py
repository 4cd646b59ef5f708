"""Routing over a simulated fleet: unequal workers are balanced untold, and nothing loses to turns.

No clock runs: see ``tests/fakes/sim_fleet.py``.
"""

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest

from frontend.router.inputs import RoutingRequest
from frontend.router.selection import costs
from frontend.router.selection.step_times import StepTimes
from tests.fakes.routing import image, request
from tests.fakes.sim_fleet import SimFleet
from tests.simgpu.gpu import GpuModel

BLOCK_OF_REQUESTS = 64
EQUAL = (0.5,) * 4
ONE_HALF_AS_FAST = (0.5, 0.5, 0.5, 0.25)


class Result(NamedTuple):
    """Of the blocks that count.

    Attributes:
        p50, p99: milliseconds to the first token.
        shares: requests of each worker.
    """

    rate: float
    p50: float
    p99: float
    shares: Counter[str]


def picture_question(block: int, picture: int, user: int) -> RoutingRequest:
    words = random.Random(f"{block} {user}")
    need = image(f"{block}-{picture}", 14, 1024, nbytes=5 << 20)
    tokens = [1] * 14 + [7] * 1024 + [words.randrange(1000, 9000) for _ in range(60)]
    return request(tokens, media=[need])


def pictures(block: int, times: int) -> list[RoutingRequest]:
    """Each picture is asked about so often, in no order."""
    shown = [number // times for number in range(BLOCK_OF_REQUESTS)]
    random.Random(block).shuffle(shown)
    return [picture_question(block, picture, user) for user, picture in enumerate(shown)]


def texts(block: int) -> list[RoutingRequest]:
    """Behind one of two common beginnings."""
    made = []
    for user in range(BLOCK_OF_REQUESTS):
        words = random.Random(f"{block} {user}")
        common = random.Random(f"{block} {words.randrange(2)}")
        tokens = [common.randrange(9000) for _ in range(200)]
        made.append(request(tokens + [words.randrange(9000) for _ in range(60)]))
    return made


def ask_all(
    fleet: SimFleet, requests: Sequence[RoutingRequest], clients: int, answer_tokens: int = 16
) -> None:
    """A closed loop."""
    waiting: Iterator[RoutingRequest] = iter(requests)

    def ask_next(now: float = 0.0) -> None:
        if (one := next(waiting, None)) is not None:
            fleet.ask(one, answer_tokens, ask_next)

    for _ in range(clients):
        ask_next()
    fleet.run(len(requests))


async def race(
    speeds: Sequence[float], times: int, clients: int, *, blocks: int = 4, **settings: Any
) -> Result:
    """Blocks of pictures, each asked about so many times, or of text; the first two warm up."""
    fleet = SimFleet(speeds, **settings)
    await fleet.start()
    rates, first_tokens, shares = [], [], Counter[str]()
    for block in range(2 + blocks):
        requests = pictures(block, times) if times else texts(block)
        began, before = fleet.now, len(fleet.done)
        ask_all(fleet, requests, clients)
        if block >= 2:
            done = fleet.done[before:]
            rates.append(len(done) / (fleet.now - began))
            first_tokens += [1e3 * (job.first_token - job.asked) for job in done]
            shares.update(job.decision.worker_id for job in done)
    await fleet.router.close()
    cuts = statistics.quantiles(first_tokens, n=100)
    return Result(statistics.median(rates), cuts[49], cuts[98], shares)


@pytest.mark.parametrize(
    ("times", "clients"), [(1, 16), (2, 16), (4, 16), (4, 32), (8, 16), (0, 16), (0, 64)]
)
async def test_never_behind_round_robin(times: int, clients: int) -> None:
    ours = await race(EQUAL, times, clients)
    turns = await race(EQUAL, times, clients, mode="round-robin")
    assert ours.rate >= 0.97 * turns.rate
    assert ours.p99 <= 1.05 * turns.p99


async def open_loop(rate: float, **settings: Any) -> Result:
    """Text, from users who come at random."""
    fleet = SimFleet((0.2,) * 8, **settings)
    await fleet.start()
    first_tokens = []
    for block in range(12):
        comes, at, before = random.Random(block), fleet.now, len(fleet.done)
        for each in texts(block):
            at += comes.expovariate(rate)
            fleet.at(at, partial(fleet.ask, each, 16))
        fleet.run(BLOCK_OF_REQUESTS)
        if block >= 2:
            first_tokens += [1e3 * (job.first_token - job.asked) for job in fleet.done[before:]]
    await fleet.router.close()
    cuts = statistics.quantiles(first_tokens, n=100)
    return Result(rate, cuts[49], cuts[98], Counter(job.decision.worker_id for job in fleet.done))


@pytest.mark.parametrize("rate", [16.0, 25.0, 35.0])
async def test_a_short_prefix_is_not_worth_waiting_for(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = await open_loop(rate)
    turns = await open_loop(rate, mode="round-robin")
    assert ours.p50 <= 1.02 * turns.p50
    assert ours.p99 <= 0.9 * turns.p99
    monkeypatch.setattr(costs, "STEP", 0.0)
    greedy = await open_loop(rate)
    assert greedy.p99 > ours.p99


async def test_a_worker_half_as_fast_gets_less_without_being_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = await race(ONE_HALF_AS_FAST, 1, 16)
    monkeypatch.setattr(StepTimes, "rounded_pace", lambda *_: 1.0)
    weights = await race(ONE_HALF_AS_FAST, 1, 16)
    turns = await race(ONE_HALF_AS_FAST, 1, 16, mode="round-robin")
    fast = sum(ours.shares[name] for name in ("w0", "w1", "w2")) / 3
    assert 0.1 <= ours.shares["w3"] / fast <= 0.65
    assert ours.rate >= 1.3 * turns.rate and ours.rate >= 1.02 * weights.rate
    assert ours.p99 <= 0.8 * weights.p99


@dataclass(frozen=True)
class UnsteadyGpu(GpuModel):
    """Steps differ as they do on a busy host, and the first ones take five times as long."""

    chance: random.Random = field(default_factory=random.Random)
    cold: list[float] = field(default_factory=lambda: [5.0] * 3)

    def step_seconds(
        self, prefill_tokens: int, encoder_tokens: int, context_tokens: int, loaded_tokens: int = 0
    ) -> float:
        seconds = super().step_seconds(
            prefill_tokens, encoder_tokens, context_tokens, loaded_tokens
        )
        if self.cold and (prefill_tokens or encoder_tokens):
            seconds *= self.cold.pop()
        return seconds * self.chance.lognormvariate(0, 0.3)


@pytest.mark.parametrize("seed", [0, 1])
async def test_equal_workers_share_a_light_load_however_they_began(seed: int) -> None:
    """Judged by its cold start for ever, a worker would be asked no more than a few times."""
    fleet = SimFleet((0.5,) * 3)
    await fleet.start()
    for name, engine in fleet.engines.items():
        engine.gpu = UnsteadyGpu(speed=0.5, chance=random.Random(f"{seed} {name}"))
    for block in range(9):
        ask_all(fleet, pictures(1000 * seed + block, 1), 1)
    await fleet.router.close()
    shares = Counter(job.decision.worker_id for job in fleet.done)
    assert min(shares.values()) >= 0.15 * len(fleet.done)


async def test_a_hot_picture_spreads_before_it_queues() -> None:
    """Every question is about one picture, and the answers are long: one worker is not enough."""
    fleet = SimFleet(EQUAL, slots=8)
    await fleet.start()
    ask_all(fleet, pictures(0, 1), 16, 200)  # so that times are known
    workers = Counter[str]()
    ask_all(fleet, [picture_question(9, 0, 0)], 1)
    before = len(fleet.done)
    for user in range(24):
        fleet.ask(picture_question(9, 0, 1 + user), 200)
    fleet.run(24)
    workers.update(job.decision.worker_id for job in fleet.done[before:])
    assert len(workers) >= 3 and max(workers.values()) <= 12
    await fleet.router.close()


async def test_a_burst_of_equal_prompts_goes_to_one_worker_while_that_is_the_better_deal() -> None:
    fleet = SimFleet(EQUAL)
    await fleet.start()
    ask_all(fleet, pictures(0, 1), 16)
    # A new picture with short questions: one encodes it, and the others wait for that.
    together = {fleet.ask(picture_question(9, 0, user), 16).worker_id for user in range(4)}
    assert len(together) == 1
    fleet.run(4)
    # The same beginning before long texts: each is more work than what is shared.
    beginning = [5] * 64
    apart = Counter(
        fleet.ask(request(beginning + [user * 5000 + i for i in range(4000)]), 16).worker_id
        for user in range(8)
    )
    assert max(apart.values()) == 2
    fleet.run(8)
    await fleet.router.close()


async def test_first_tokens_come_when_they_are_expected() -> None:
    fleet = SimFleet(ONE_HALF_AS_FAST)
    await fleet.start()
    for block in range(4):
        ask_all(fleet, pictures(block, 4), 8)
    errors = [
        abs(job.decision.predicted_first_token_s - (job.first_token - job.asked))
        for job in fleet.done[-64:]
        if job.decision.predicted_first_token_s is not None
    ]
    seconds = [job.first_token - job.asked for job in fleet.done[-64:]]
    assert len(errors) == 64
    assert statistics.mean(errors) <= 0.3 * statistics.mean(seconds)
    await fleet.router.close()
