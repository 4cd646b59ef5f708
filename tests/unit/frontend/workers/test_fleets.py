"""Which fleet a card is for, where one frontend serves several models."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from common.discovery.base import CardPresent, CardRefused
from common.errors import CardError, ConfigurationError, NoWorkerError
from common.identity import Incarnation, WorkerId
from common.request_plane.card import WorkerCard, WorkerState
from frontend.workers import fleets as fleets_module
from frontend.workers.members import Run
from tests.fakes.fleet import City, Worker, gone
from tests.waiting import until

A, B, C = "alpha", "beta", "gamma"


@pytest.fixture
async def city() -> AsyncIterator[City]:
    city = City()
    yield city
    await city.close()


def card_of(worker: Worker, model: str, worker_id: str, **changes: Any) -> WorkerCard:
    path = {"model": f"/models/{model}"}
    return worker.card(
        worker_id, model=path | changes.pop("settings", {}), served_model_names=[model], **changes
    )


async def joined(city: City, model: str, worker_id: str, **changes: Any) -> WorkerCard:
    card = card_of(city.start(f"i-{worker_id}"), model, worker_id, **changes)
    city.news.say(CardPresent(card))
    await until(lambda: worker_id in city.connected(card.served_model_names[0]))
    return card


async def refused(city: City, card: WorkerCard) -> str:
    """Why, once it is."""
    city.news.say(CardPresent(card))
    await until(lambda: card.worker_id in city.fleets.refusals.by_worker())
    return city.fleets.refusals.by_worker()[card.worker_id]


async def left(city: City, card: WorkerCard) -> None:
    """A worker is gone, card and link."""
    city.news.say(gone(card))
    fleet = city.fleets.of(card.served_model_names[0])
    assert fleet is not None
    member = fleet.members.get(Run(card.worker_id, card.incarnation))
    assert member is not None
    await until(lambda: not member.present)
    if member.link is not None:
        member.link._lose("for the test")


async def test_each_model_has_its_own_fleet_and_router(city: City) -> None:
    with pytest.raises(NoWorkerError, match="none has registered"):
        city.fleets.check_available()
    await joined(city, A, "a0")
    await joined(city, B, "b0")
    await joined(city, A, "a1")
    assert city.connected(A) == {"a0", "a1"} and city.connected(B) == {"b0"}
    assert [fleet.names for fleet in city.fleets] == [[A], [B]] and len(city.came) == 2
    city.fleets.check_available()
    assert REGISTRY.get_sample_value("mmrouter_workers", {"state": "connected"}) == 3


async def test_a_model_leaves_with_its_last_worker_and_comes_back(city: City) -> None:
    first, second = await joined(city, A, "a0"), await joined(city, A, "a1")
    await joined(city, B, "b0")
    (fleet, is_gone), _ = city.came
    await left(city, first)
    await until(lambda: city.connected(A) == {"a1"})
    assert not is_gone.is_set()
    await left(city, second)
    await asyncio.wait_for(is_gone.wait(), 20)
    assert {each.run.worker_id for each in city.fleets.departures.recent()} == {"a0", "a1"}
    assert REGISTRY.get_sample_value("mmrouter_workers", {"state": "lost"}) == 2
    assert city.fleets.of(A) is None and city.connected(B) == {"b0"}
    # Until the old one is closed its name and its place are taken.
    again = card_of(city.start("i2"), A, "a0")
    assert "has the name alpha" in await refused(city, again)
    await city.let_go(fleet)
    await until(lambda: city.connected(A) == {"a0"})
    assert city.fleets.of(A) is not fleet and not city.fleets.refusals.by_worker()


async def test_models_beyond_the_limit_are_refused_until_one_has_left(city: City) -> None:
    first = await joined(city, A, "a0")
    await joined(city, B, "b0")
    third = card_of(city.start("i-c0"), C, "c0")
    assert "--max-models" in await refused(city, third)
    assert REGISTRY.get_sample_value("mmrouter_workers", {"state": "refused"}) == 1
    await left(city, first)
    fleet, is_gone = city.came[0]
    await asyncio.wait_for(is_gone.wait(), 20)
    assert city.fleets.of(C) is None, "what is closed still takes memory"
    await city.let_go(fleet)
    await until(lambda: city.connected(C) == {"c0"})
    assert not city.fleets.refusals.by_worker()


async def test_equal_names_and_another_contract_are_refused_by_the_fleet(city: City) -> None:
    await joined(city, A, "a0")
    other = card_of(city.start("i1"), A, "a1", settings={"max_model_len": 8192})
    assert "model.max_model_len is 8192" in await refused(city, other)
    # Once the first is gone, it is its turn.
    (fleet, is_gone) = city.came[0]
    member = next(iter(fleet.members))
    await left(city, member.card)
    await asyncio.wait_for(is_gone.wait(), 20)
    await city.let_go(fleet)
    await until(lambda: city.connected(A) == {"a1"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"served_model_names": ["other", A]}, "has the name alpha here"),
        ({"settings": {"model": f"/models/{A}", "dtype": "bfloat16"}}, "model.dtype"),
        ({"served_model_names": ["a\nb"]}, "printable"),
        ({"served_model_names": ["x" * 600]}, "printable"),
        ({"served_model_names": [f"n{each}" for each in range(65)]}, "64 names"),
        ({"vllm_version": "0.1"}, "vllm_version"),
        ({"settings": {"trust_remote_code": True}}, "--trust-remote-code"),
        ({"fleet_key": "theirs"}, "key"),
    ],
)
async def test_what_can_not_be_served_beside_the_others(
    city: City, changes: dict[str, Any], reason: str
) -> None:
    await joined(city, A, "a0")
    card = card_of(city.start("i1"), B, "b0")
    settings = changes.get("settings", {})
    others = {name: value for name, value in changes.items() if name != "settings"}
    card = card.model_copy(update={**others, "model": card.model.model_copy(update=settings)})
    assert reason in await refused(city, card)
    assert len(list(city.fleets)) == 1 and len(city.came) == 1


async def test_environments_of_one_process_must_agree(city: City) -> None:
    card = await joined(city, A, "a0")
    other = card.environment.model_copy(update={"video_loader_backend": "pynvvideocodec"})
    theirs = card_of(city.start("i1"), B, "b0", environment=other)
    assert "environment" in await refused(city, theirs)


async def test_a_card_that_changes_its_model(city: City) -> None:
    card = await joined(city, A, "a0")
    await joined(city, A, "a1")
    changed = card.model_copy(update={"served_model_names": [B]})
    assert "start it again" in await refused(city, changed)
    await until(lambda: city.connected(A) == {"a1"})
    assert city.fleets.of(B) is None
    city.news.say(CardPresent(card))  # nor does it help to change it back
    city.news.say(gone(card))
    await until(lambda: not city.fleets.refusals.by_worker())
    await joined(city, B, "a0")


async def test_a_card_that_does_not_fit_any_more_waits_for_its_model_to_leave(city: City) -> None:
    first, second = await joined(city, A, "a0"), await joined(city, A, "a1")
    longer = second.model.model_copy(update={"max_model_len": 8192})
    assert "max_model_len" in await refused(city, second.model_copy(update={"model": longer}))
    fleet, is_gone = city.came[0]
    await left(city, first)
    await asyncio.wait_for(is_gone.wait(), 20)
    await city.let_go(fleet)
    await until(lambda: city.connected(A) == {"a1"})


async def test_worker_ids_are_of_all_models_together(city: City) -> None:
    card = await joined(city, A, "w")
    await joined(city, A, "a1")
    namesake = card_of(city.start("i2"), B, "w")
    assert "--worker-id" in await refused(city, namesake)
    await left(city, card)
    await until(lambda: city.connected(B) == {"w"})
    assert city.connected(A) == {"a1"} and not city.fleets.refusals.by_worker()


async def test_a_model_that_can_not_be_loaded_leaves_nothing(
    city: City, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets_module, "RETRY_S", 0.5)
    card = await joined(city, A, "a0")
    fleet, is_gone = city.came[0]
    city.fleets.give_up(fleet, ConfigurationError("its files can't be read here"))
    await asyncio.wait_for(is_gone.wait(), 20)
    await city.let_go(fleet)
    assert "files can't be read" in await refused(city, card)
    assert not list(city.fleets) and len(city.came) == 1
    # Later it may be better.
    city.news.say(gone(card))
    await until(lambda: not city.fleets.refusals.by_worker())
    again = city.start("i9")
    city.news.say(CardPresent(card_of(again, A, "a0")))
    await until(lambda: city.connected(A) == {"a0"})


async def test_who_drains_or_is_illegible_makes_no_model(city: City) -> None:
    card = card_of(city.start("i0"), A, "a0", state=WorkerState.DRAINING)
    city.news.say(CardPresent(card))
    city.news.say(CardRefused(WorkerId("bad"), Incarnation("i"), CardError("malformed")))
    await until(lambda: city.fleets.refusals.by_worker() == {"bad": "malformed"})
    assert not list(city.fleets) and not city.came


async def test_a_refused_worker_that_goes_is_forgotten(city: City) -> None:
    await joined(city, A, "a0")
    await joined(city, B, "b0")
    third = card_of(city.start("i-c0"), C, "c0")
    await refused(city, third)
    city.news.say(gone(third))
    await until(lambda: not city.fleets.refusals.by_worker())
    fleet, is_gone = city.came[0]
    await left(city, next(iter(fleet.members)).card)
    await asyncio.wait_for(is_gone.wait(), 20)
    await city.let_go(fleet)
    assert city.fleets.of(C) is None and len(city.came) == 2
