"""The router as its caller sees it: where requests go, why, and what stays behind."""

import asyncio
import gc
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from common.errors import ConfigurationError, NoWorkerError, RequestRejectedError
from common.identity import Incarnation, MmHash, RequestId, Target, WorkerId
from common.observability.telemetry import (
    DECISIONS,
    PREDICTED_CACHED_TOKENS,
    PROMPT_TOKENS,
    REALISED_CACHED_TOKENS,
)
from frontend.router import in_flight
from frontend.router.decision import DecisionLog
from frontend.router.hashing import LoraKey, PromptEmbeds
from frontend.router.index import APPROXIMATE_TTL_S
from frontend.router.index.indexes import Knowledge
from frontend.router.inputs import EventSource, RoutableWorker, RoutingRequest
from frontend.router.modes import BuiltInMode
from frontend.router.router import CANDIDATES, Router
from frontend.router.settings import RouterSettings
from tests.fakes.reports import rank_report
from tests.fakes.routing import BLOCK, Clock, image, numbers, prompt, request, worker
from tests.waiting import until

MakeRouter = Callable[..., Awaitable[Router]]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def fleet(clock: Clock) -> AsyncIterator[MakeRouter]:
    """Makes routers with workers, and closes them."""
    routers: list[Router] = []

    async def make(*workers: RoutableWorker | str, **settings: Any) -> Router:
        router = Router(RouterSettings.model_validate(settings), clock=clock, seed=3)
        routers.append(router)
        for one in workers:
            await router.roster.add(worker(one) if isinstance(one, str) else one)
        return router

    yield make
    for router in routers:
        await router.close()


def serve(router: Router, one: RoutingRequest, cached: int | None = 0) -> str:
    """Route a request, let it run to its end, and say where it went."""
    decision = router.route(one)
    router.in_flight.first_token(one.request_id, cached or 0)
    router.in_flight.finished(one.request_id, served=cached is not None)
    return decision.worker_id


# The fleet


async def test_without_workers_there_is_nowhere_to_go(fleet: MakeRouter) -> None:
    router = await fleet()
    with pytest.raises(NoWorkerError, match="no worker is registered"):
        router.route(request(prompt(1)))


async def test_excluded_workers_are_not_considered(fleet: MakeRouter) -> None:
    router = await fleet("a", "b")
    for _ in range(10):
        decision = router.route(request(prompt(1)), exclude={WorkerId("a")})
        assert (decision.worker_id, decision.reason) == ("b", "only-worker")
    with pytest.raises(NoWorkerError, match="excluded"):
        router.route(request(prompt(1)), exclude=[WorkerId("a"), WorkerId("b")])


async def test_all_ranks_are_targets(fleet: MakeRouter) -> None:
    router = await fleet(worker("a", ranks=(0, 1, 2)))
    assert router.roster.targets() == [Target(WorkerId("a"), rank) for rank in range(3)]
    ranks = {router.route(request(prompt(seed))).rank for seed in range(3)}
    assert ranks == {0, 1, 2}


async def test_a_worker_whose_hashes_cannot_be_computed_is_refused(fleet: MakeRouter) -> None:
    router = await fleet("a")
    with pytest.raises(ConfigurationError, match="sha256_cbor"):
        await router.roster.add(worker("b", hash_algorithm="sha256"))
    assert list(router.roster.workers) == ["a"]


async def test_a_new_incarnation_knows_nothing_of_the_old(fleet: MakeRouter) -> None:
    router = await fleet("a", "b")
    one = request(prompt(1), media=[image("x")])
    home = serve(router, one)
    other = {WorkerId("ab".replace(home, ""))}
    router.media.acked(WorkerId(home), [MmHash("x")])
    assert router.route(one, exclude=other).overlap_blocks == 7
    await router.roster.add(worker(home, incarnation=Incarnation("2")))
    assert router.route(one, exclude=other).overlap_blocks == 0
    assert not router.media.holds(WorkerId(home), MmHash("x"))


async def test_adding_the_same_worker_again_changes_nothing(fleet: MakeRouter) -> None:
    router = await fleet("a")
    serve(router, request(prompt(1)))
    await router.roster.add(worker("a"))
    assert router.route(request(prompt(1))).overlap_blocks == 7


async def test_requests_of_a_removed_worker_may_still_end(fleet: MakeRouter) -> None:
    router = await fleet("a", "b")
    one = request(prompt(1))
    decision = router.route(one)
    await router.roster.remove(decision.worker_id)
    await router.roster.remove(decision.worker_id)
    router.in_flight.first_token(one.request_id, 5)
    router.in_flight.finished(one.request_id, served=True)
    assert decision.realised_cached_tokens == 5
    assert len(router.roster.targets()) == 1


# Prefixes


async def test_a_prompt_returns_to_where_it_ran(fleet: MakeRouter) -> None:
    router = await fleet("a", "b", "c")
    homes = {seed: serve(router, request(prompt(seed))) for seed in range(20)}
    for seed, home in homes.items():
        decision = router.route(request([*prompt(seed), 7, 7]))
        assert (decision.worker_id, decision.reason) == (home, "kv-overlap")
        assert decision.overlap_blocks == 8
        assert decision.predicted_cached_tokens == 8 * BLOCK


async def test_a_prompt_held_to_its_last_token_hits_one_block_less(fleet: MakeRouter) -> None:
    router = await fleet("a")
    serve(router, request(prompt(1)))
    assert router.route(request(prompt(1))).predicted_cached_tokens == 7 * BLOCK
    assert router.route(request(prompt(1)[:BLOCK])).predicted_cached_tokens == 0


async def test_drafting_engines_recompute_one_more_block(fleet: MakeRouter) -> None:
    router = await fleet(worker("a", drops_last_block=True))
    serve(router, request(prompt(1)))
    assert router.route(request([*prompt(1), 5])).predicted_cached_tokens == 7 * BLOCK


async def test_a_request_for_an_adapter_goes_where_it_is(fleet: MakeRouter) -> None:
    story = LoraKey("story", "/s")
    router = await fleet("a", worker("b", adapters=frozenset({story})), "c")
    for seed in range(5):
        assert router.route(request(prompt(seed), lora=story)).worker_id == "b"
    with pytest.raises(NoWorkerError, match="excluded"):
        router.route(request(prompt(1), lora=story), exclude=[WorkerId("b")])
    with pytest.raises(NoWorkerError, match="no worker has the adapter story"):
        router.route(request(prompt(1), lora=LoraKey("story", "/elsewhere")))
    assert router.route(request(prompt(1)), exclude=[WorkerId("b")]).worker_id in ("a", "c")


async def test_an_ejected_worker_is_the_last_resort(fleet: MakeRouter) -> None:
    story = LoraKey("story", "/s")
    router = await fleet(worker("a", adapters=frozenset({story})), "b")
    router.ejection.eject(WorkerId("a"), Incarnation("1"), "for the test")
    assert router.route(request(prompt(1), lora=story)).worker_id == "a"


async def test_requests_that_do_not_read_the_cache_predict_nothing(fleet: MakeRouter) -> None:
    router = await fleet("a", worker("b", prefix_caching=False))
    serve(router, request(prompt(1)), cached=0)
    decision = router.route(request(prompt(1), reads_cache=False))
    assert decision.predicted_cached_tokens == 0
    assert "without prefix caching" in router.roster.state(Target(WorkerId("b"), 0)).reason


async def test_prompts_of_embeddings_are_told_apart_by_them(fleet: MakeRouter) -> None:
    """The tokens that they stand for are the same in all of them."""
    router = await fleet("a", "b")
    zeros = [0] * (8 * BLOCK + 1)

    def given(byte: bytes) -> RoutingRequest:
        return request(zeros, embeds=PromptEmbeds(memoryview(byte * 4 * len(zeros)), len(zeros)))

    serve(router, given(b"a"))
    assert router.route(given(b"a")).overlap_blocks == 8
    assert router.route(given(b"b")).overlap_blocks == 0
    assert router.route(request(zeros)).overlap_blocks == 0


async def test_the_same_text_with_another_picture_is_another_prompt(fleet: MakeRouter) -> None:
    router = await fleet("a", "b")
    serve(router, request(prompt(1), media=[image("cat")]))
    assert router.route(request([*prompt(1), 1], media=[image("cat")])).overlap_blocks == 8
    assert router.route(request([*prompt(1), 1], media=[image("dog")])).overlap_blocks == 0


async def test_two_identical_prompts_arriving_together_go_to_the_same_worker(
    fleet: MakeRouter,
) -> None:
    router = await fleet("a", "b", "c", "d")
    for seed in range(10):
        first, second = (router.route(request([*prompt(seed, 40), 1])) for _ in range(2))
        assert (second.worker_id, second.reason) == (first.worker_id, "kv-overlap")


async def test_predictions_expire(fleet: MakeRouter, clock: Clock) -> None:
    router = await fleet("a")
    serve(router, request(prompt(1)))
    clock.now += 0.9 * APPROXIMATE_TTL_S
    assert router.route(request(prompt(1))).overlap_blocks == 7
    # Routing it anew has renewed the prediction.
    clock.now += 0.9 * APPROXIMATE_TTL_S
    assert router.route(request(prompt(1))).overlap_blocks == 7
    clock.now += 1.1 * APPROXIMATE_TTL_S
    router.route(request(prompt(2)))
    assert router.route(request(prompt(1))).overlap_blocks == 0


async def test_a_request_without_output_takes_its_prediction_back(fleet: MakeRouter) -> None:
    router = await fleet("a")
    serve(router, request(prompt(1)), cached=None)
    assert router.route(request(prompt(1))).overlap_blocks == 0


async def test_a_request_that_moves_on_counts_once(fleet: MakeRouter) -> None:
    router = await fleet("a", "b")
    one = request(prompt(1))
    first = router.route(one)
    router.in_flight.finished(one.request_id)
    second = router.route(one, exclude={first.worker_id})
    assert second.worker_id != first.worker_id
    assert router.decisions.last(1) == [second]
    loads = {one: router.load.load(one) for one in router.load.targets()}
    assert [loads[Target(d.worker_id, 0)].active for d in (first, second)] == [0, 1]


async def test_workers_with_different_block_sizes(fleet: MakeRouter) -> None:
    router = await fleet("a", worker("b", block_size=32))
    homes = [serve(router, request(prompt(seed))) for seed in range(12)]
    assert set(homes) == {"a", "b"}
    for seed, home in enumerate(homes):
        decision = router.route(request([*prompt(seed), 1]))
        assert decision.worker_id == home
        assert decision.predicted_cached_tokens == 8 * BLOCK
        router.in_flight.finished(decision.request_id, served=True)


async def test_hashes_computed_elsewhere_are_used(fleet: MakeRouter) -> None:
    router = await fleet("a")
    one = request(prompt(1), media=[image("x")])
    hashes = await asyncio.to_thread(router.hash, one)
    serve(router, replace(one, hashes=hashes))
    assert router.route(request([*prompt(1), 1], media=[image("x")])).overlap_blocks == 8


async def test_a_prompt_that_cannot_be_hashed_is_the_users_error(fleet: MakeRouter) -> None:
    router = await fleet("a")
    with pytest.raises(RequestRejectedError):
        router.route(request([-1] * BLOCK))
    assert len(router.in_flight) == 0


# Media


async def test_a_worker_that_holds_the_picture_is_cheaper(fleet: MakeRouter) -> None:
    router = await fleet("a", "b", "c")
    router.media.acked(WorkerId("b"), [MmHash("x")])
    for seed in range(5):
        one = request(prompt(seed), media=[image("x", offset=40)])
        decision = router.route(one)
        assert (decision.worker_id, decision.reason) == ("b", "media")
        chosen = decision.considered[0].work
        assert (chosen.media_tokens, chosen.ship_bytes) == (0, 0)
        assert decision.considered[1].work.ship_bytes == 6 << 20
        router.in_flight.finished(one.request_id, served=True)
    router.media.nacked(WorkerId("b"), [MmHash("x")])
    assert not router.media.holds(WorkerId("b"), MmHash("x"))


async def test_two_requests_with_one_new_picture_go_together(fleet: MakeRouter) -> None:
    router = await fleet("a", "b", "c")
    first = request(prompt(1), media=[image("x", length=100)])
    second = request(prompt(2), media=[image("x", length=100)])
    home = serve(router, first)
    assert router.route(second).worker_id == home
    assert not router.media.holds(WorkerId(home), MmHash("x"))


async def test_a_picture_inside_the_cached_prefix_is_not_encoded(fleet: MakeRouter) -> None:
    router = await fleet("a")
    one = request([*prompt(1), 1], media=[image("x", length=2 * BLOCK), image("y", 100, 28)])
    serve(router, one)
    router.media.nacked(WorkerId("a"), [MmHash("x"), MmHash("y")])
    again = replace(one, request_id=RequestId("again"), token_ids=one.token_ids[: 4 * BLOCK + 1])
    again = replace(again, media=[image("x", length=2 * BLOCK), image("z", 4 * BLOCK, 1)])
    work = router.route(again).considered[0].work
    assert work.overlap_blocks == 4
    assert work.media_tokens == 1
    assert work.ship_bytes == 2 * (6 << 20)


async def test_acks_of_unknown_workers_are_not_kept(fleet: MakeRouter) -> None:
    router = await fleet("a")
    router.media.acked(WorkerId("gone"), [MmHash("x")])
    assert router.media._workers == {}


# Load


async def test_different_prompts_spread_over_the_fleet(fleet: MakeRouter) -> None:
    router = await fleet("a", "b", "c", "d")
    for seed in range(40):
        router.route(request(prompt(seed)))
    assert set(Counter(d.worker_id for d in router.decisions.last()).values()) == {10}


async def test_one_hot_prefix_spreads_once_its_worker_is_full(fleet: MakeRouter) -> None:
    slots, names = 4, ("a", "b", "c", "d")
    router = await fleet(*(worker(name, max_num_seqs=slots) for name in names))
    hot = prompt(1, blocks=200)
    running: Counter[str] = Counter()
    for turn in range(slots * len(names)):
        one = request([*hot, turn])
        decision = router.route(one)
        router.in_flight.first_token(one.request_id)
        running[decision.worker_id] += 1
        idle = set(names) - set(running)
        assert not idle or max(running.values()) <= slots, f"{idle} idle while another queues"
    assert running == dict.fromkeys(names, slots)
    # The first worker was filled before the second got anything: affinity is not given up.
    assert [one.reason for one in router.decisions.last()].count("spread") == len(names) - 1


async def test_without_known_slots_load_alone_spreads_a_hot_prefix(fleet: MakeRouter) -> None:
    router = await fleet("a", "b", "c", "d")
    hot = prompt(1, blocks=200)
    running: Counter[str] = Counter()
    for turn in range(200):
        one = request([*hot, turn])
        running[router.route(one).worker_id] += 1
        router.in_flight.first_token(one.request_id)
    assert min(running[name] for name in "abcd") > 30


async def test_load_of_other_frontends_counts(fleet: MakeRouter) -> None:
    router = await fleet("a", "b")
    others = rank_report(active=12, waiting=4, prefill_tokens=5000, kv_usage=0.5)
    router.load.reported(WorkerId("a"), [others])
    for seed in range(5):
        assert router.route(request(prompt(seed))).worker_id == "b"


@pytest.mark.parametrize("mode", list(BuiltInMode))
async def test_every_mode_routes_and_predicts(fleet: MakeRouter, mode: BuiltInMode) -> None:
    router = await fleet("a", "b", mode=mode)
    for _ in range(6):
        one = request(prompt(1))
        decision = router.route(one)
        assert decision.mode == mode
        router.in_flight.finished(one.request_id, served=True)
    assert any(one.predicted_cached_tokens for one in router.decisions.last())


# What can be seen


async def test_a_decision_shows_its_candidates_cheapest_first(fleet: MakeRouter) -> None:
    names = [f"w{number}" for number in range(30)]
    router = await fleet(*names)
    decision = router.route(request(prompt(1)))
    assert decision.candidates_total == 30
    assert len(decision.considered) == CANDIDATES
    costs = [one.cost for one in decision.considered]
    assert costs == sorted(costs)
    assert decision.considered[0].cost == 8 * BLOCK
    assert decision.worker_id in {one.target.worker_id for one in decision.considered}
    assert decision.index == Knowledge.APPROXIMATE
    assert decision.micros > 0


async def test_predicted_and_realised_tokens_are_counted(fleet: MakeRouter) -> None:
    def counters() -> list[float]:
        return [
            PREDICTED_CACHED_TOKENS.labels("counted")._value.get(),
            REALISED_CACHED_TOKENS.labels("counted")._value.get(),
            PROMPT_TOKENS.labels("counted")._value.get(),
            DECISIONS.labels("counted", "only-worker")._value.get(),
        ]

    router = await fleet("counted")
    before = counters()
    serve(router, request([*prompt(1), 1]), cached=0)
    serve(router, request([*prompt(1), 1]), cached=128)
    assert [after - old for after, old in zip(counters(), before, strict=True)] == [
        128,
        128,
        258,
        2,
    ]


async def test_tokens_of_a_request_are_counted_together_so_that_no_hit_rate_exceeds_one(
    fleet: MakeRouter,
) -> None:
    """Of requests that take longer than the interval between two readings."""

    def counters() -> list[float]:
        kinds = PROMPT_TOKENS, PREDICTED_CACHED_TOKENS, REALISED_CACHED_TOKENS
        return [kind.labels("together")._value.get() for kind in kinds]

    router = await fleet("together")
    serve(router, request([*prompt(1), 1]))
    before, one = counters(), request([*prompt(1), 1])
    router.route(one)
    assert counters() == before
    router.in_flight.first_token(one.request_id, 128)
    assert [now - then for now, then in zip(counters(), before, strict=True)] == [129, 128, 128]
    after = counters()
    router.in_flight.first_token(one.request_id, 128)
    router.in_flight.finished(one.request_id, served=True)
    assert counters() == after


async def test_every_part_hears_of_a_decision(fleet: MakeRouter) -> None:
    router = await fleet("a", "b")
    router.route(request(prompt(1), media=[image("x")]))
    assert router.roster.indexes.predicted.blocks == 8
    assert len(router.media._ages) == 1
    assert len(router.decisions) == len(router.in_flight) == 1
    states = map(router.roster.state, router.roster.targets())
    assert [state.knowledge for state in states] == [Knowledge.APPROXIMATE] * 2
    assert (
        sum(
            load.active
            for load in {one: router.load.load(one) for one in router.load.targets()}.values()
        )
        == 1
    )


async def test_nothing_grows_while_requests_and_workers_come_and_go(
    fleet: MakeRouter, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "APPROXIMATE_TTL_S", 5.0)
    router = await fleet("a", "b")
    router.decisions = DecisionLog(50)
    router.media._capacity = 20
    for held in router.media._held.values():
        held._budget = 20
    for memo in router.roster.hashers.values():
        memo._prompts._budget = memo._max_tokens = 2000

    async def run(turns: int) -> None:
        for turn in range(turns):
            clock.now += 0.1
            if turn % 50 == 25:
                await router.roster.add(worker("a", incarnation=Incarnation(str(clock.now))))
            seed = next(numbers)
            one = request(prompt(seed), media=[image(str(seed))])
            home = serve(router, one)
            router.media.acked(WorkerId(home), [MmHash(str(seed))])

    await run(300)
    gc.collect()
    tracemalloc.start()
    await run(200)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    await run(400)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after < before + 100_000
    assert len(router.in_flight) == 0


async def test_closing_stops_everything(fleet: MakeRouter) -> None:
    source = EventSource(0, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
    router = await fleet(worker("a", event_sources=(source,)))
    state = partial(router.roster.state, Target(WorkerId("a"), 0))
    await until(lambda: "no connection" in state().reason)
    before = len(asyncio.all_tasks())
    await router.close()
    assert len(asyncio.all_tasks()) < before
    assert len(asyncio.all_tasks()) == 1
