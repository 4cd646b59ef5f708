"""Busy and ejected workers, as the router's caller sees them."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import (
    EngineFailedError,
    FleetBusyError,
    NoWorkerError,
    RequestRejectedError,
    WorkerBusyError,
)
from common.identity import Incarnation, Target, WorkerId
from frontend.router.decision import Decision
from frontend.router.ejection import Circuit
from frontend.router.router import Router
from frontend.router.settings import RouterSettings
from tests.fakes.reports import rank_report
from tests.fakes.routing import Clock, prompt, request, worker

A, B = WorkerId("a"), WorkerId("b")
KV_TOKENS = 1000
_seeds = itertools.count()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def router(clock: Clock) -> AsyncIterator[Router]:
    settings = RouterSettings.model_validate(
        {
            "busy_blocks_fraction": 0.9,
            "busy_prefill_tokens": 300,
        }
    )
    router = Router(settings, clock=clock, seed=3)
    for name in ("a", "b"):
        await router.roster.add(worker(name, kv_tokens=KV_TOKENS))
    yield router
    await router.close()


def route(router: Router, **how: Any) -> Decision:
    return router.route(request(prompt(next(_seeds))), **how)


def serve(router: Router) -> str:
    decision = route(router)
    router.in_flight.first_token(decision.request_id)
    router.in_flight.finished(decision.request_id, served=True)
    return decision.worker_id


def report(router: Router, worker_id: WorkerId, **load: Any) -> None:
    router.load.reported(worker_id, [rank_report(**{"active": 1, **load})])


def fail(router: Router, worker_id: WorkerId, times: int = 3) -> None:
    other = B if worker_id == A else A
    for _ in range(times):
        decision = route(router, exclude={other})
        assert decision.worker_id == worker_id
        router.in_flight.failed(decision, EngineFailedError("broken"))
        router.in_flight.finished(decision.request_id)


async def test_a_worker_whose_cache_is_full_gets_nothing_more(router: Router) -> None:
    report(router, A, kv_usage=0.95)
    assert {serve(router) for _ in range(10)} == {"b"}
    assert Target(A, 0) in router.load.busy() and Target(B, 0) not in router.load.busy()
    report(router, A, kv_usage=0.85)
    assert Target(A, 0) not in router.load.busy()


async def test_prompts_on_their_way_count_before_any_report(router: Router) -> None:
    report(router, A, kv_usage=0.85)
    report(router, B, kv_usage=0.95)
    assert route(router).worker_id == "a"  # its 128 tokens will fill it
    with pytest.raises(FleetBusyError, match="every worker is busy"):
        route(router)


async def test_prefill_in_the_queue_makes_busy_and_its_end_does_not(router: Router) -> None:
    taken = [route(router) for _ in range(6)]
    with pytest.raises(FleetBusyError):
        router.check_room()
    router.in_flight.first_token(taken[0].request_id)
    router.check_room()
    assert route(router).worker_id == taken[0].worker_id


async def test_what_was_accepted_before_is_not_refused_later(router: Router) -> None:
    for worker_id in (A, B):
        report(router, worker_id, kv_usage=0.99)
    with pytest.raises(FleetBusyError):
        route(router)
    assert route(router, exclude={A}, accepted=True).worker_id == "b"


async def test_an_idle_worker_is_never_busy(router: Router) -> None:
    for worker_id in (A, B):
        report(router, worker_id, active=0, kv_usage=0.99)
    router.check_room()


async def test_a_worker_that_fails_again_and_again_is_left_alone_and_tried_later(
    router: Router, clock: Clock
) -> None:
    fail(router, A)
    assert router.ejection.circuit(A) == (Circuit.OPEN, "engine failed")
    assert {serve(router) for _ in range(10)} == {"b"}
    clock.now += 2.0
    decisions = [route(router), route(router)]
    assert {one.worker_id for one in decisions} == {"a", "b"}
    assert {serve(router) for _ in range(10)} == {"b"}, "one request at a time"
    (trial,) = [one for one in decisions if one.worker_id == "a"]
    assert router.ejection.circuit(A)[0] is Circuit.HALF_OPEN
    router.in_flight.first_token(trial.request_id)
    assert router.ejection.circuit(A) == (Circuit.CLOSED, "")
    assert route(router).worker_id == "a", "it has the least to do"


async def test_the_users_mistakes_and_full_queues_are_not_held_against_a_worker(
    router: Router,
) -> None:
    for error in (RequestRejectedError("no"), WorkerBusyError("full")):
        for _ in range(5):
            router.in_flight.failed(route(router, exclude={B}, accepted=True), error)
    assert router.ejection.circuit(A) == (Circuit.CLOSED, "")


async def test_with_all_out_the_least_bad_goes_on(router: Router, clock: Clock) -> None:
    fail(router, A)
    fail(router, B)
    assert {serve(router), serve(router)} <= {"a", "b"}  # and who answers is in again
    for _ in range(2):
        router.ejection.eject(A, Incarnation("1"), "link_lost")
        clock.now += 10.0
        route(router, exclude={B})
    router.ejection.eject(A, Incarnation("1"), "link_lost")
    router.ejection.eject(B, Incarnation("1"), "link_lost")
    assert router.ejection.circuit(A)[0] is router.ejection.circuit(B)[0] is Circuit.OPEN
    assert {route(router).worker_id for _ in range(2)} == {"b"}
    with pytest.raises(NoWorkerError):
        route(router, exclude={A, B})


async def test_a_lost_worker_is_tried_when_it_is_back_and_a_restarted_one_is_trusted(
    router: Router,
) -> None:
    await router.roster.remove(A)
    router.ejection.eject(A, Incarnation("1"), "link_lost")
    await router.roster.add(worker("a", kv_tokens=KV_TOKENS))
    assert {serve(router) for _ in range(5)} == {"b"}
    router.ejection.forget(A)
    assert router.ejection.circuit(A)[0] is Circuit.CLOSED


async def test_what_failed_at_a_worker_is_not_held_against_its_successor(router: Router) -> None:
    decisions = [route(router, exclude={B}) for _ in range(3)]
    await router.roster.remove(A)
    await router.roster.add(worker("a", kv_tokens=KV_TOKENS, incarnation="2"))
    for decision in decisions:
        router.in_flight.failed(decision, EngineFailedError("broken"))
        router.in_flight.finished(decision.request_id)
    assert router.ejection.circuit(A)[0] is Circuit.CLOSED
