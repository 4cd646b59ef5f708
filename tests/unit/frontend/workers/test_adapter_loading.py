"""Adapters that workers load for requests. Links and services are real, engines are not."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from vllm.lora.request import LoRARequest

from common.card import Adapter
from common.discovery.base import CardPresent
from common.identity import WorkerId
from common.operations import LoadLoraAdapter, Operation, Pause, UnloadLoraAdapter
from frontend.router import LoraKey
from frontend.workers import adapter_loading
from frontend.workers.operations import perform
from tests.fakes.fleet import Town
from tests.waiting import until

STORY = Adapter(name="story", path="/s", is_3d_lora_weight=True)
KEY = LoraKey("story", "/s")
ASKED = LoRARequest(lora_name="story", lora_int_id=7, lora_path="/s", is_3d_lora_weight=True)


class Place:
    """``w0`` has an adapter; ``w1`` and ``w2`` load what a request needs."""

    def __init__(self, town: Town) -> None:
        self.town = town
        self.workers = {"w1": town.start("i1"), "w2": town.start("i2")}

    async def come(self, *, loads: bool = True) -> None:
        town = self.town
        town.news.say(CardPresent(town.card(adapters=[STORY])))
        for name, each in self.workers.items():
            town.news.say(CardPresent(each.card(name, loads_adapters=loads)))
        await until(lambda: len(town.router.roster.workers) == 3)

    async def load(self, asked: LoRARequest = ASKED, *exclude: str) -> bool:
        return await self.town.fleet.load_adapter(asked, [WorkerId(name) for name in exclude])

    def asked(self) -> list[Operation]:
        return [one for each in self.workers.values() for one in each.engine.operations]

    def holders(self) -> set[str]:
        workers = self.town.router.roster.workers
        return {name for name, one in workers.items() if KEY in one.adapters}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    town = Town()
    yield Place(town)
    await town.close()


async def test_one_more_worker_has_it_at_once(place: Place) -> None:
    await place.come()
    assert await place.load()
    assert len(place.holders()) == 2
    (operation,) = place.asked()
    assert operation == LoadLoraAdapter("story", "/s", is_3d_lora_weight=True, for_request=True)
    assert await place.load()
    assert place.holders() == {"w0", "w1", "w2"}
    assert not await place.load(), "all have it"


async def test_all_who_wait_for_it_load_it_once(place: Place) -> None:
    await place.come()
    gate = asyncio.Event()
    for each in place.workers.values():
        each.engine.operating = lambda operation: gate.wait()  # type: ignore[assignment,return-value]
    waiting = [asyncio.create_task(place.load()) for _ in range(5)]
    await until(lambda: len(place.asked()) == 1)
    waiting[0].cancel()  # whoever asked first does not take it along
    gate.set()
    assert await asyncio.gather(*waiting[1:]) == [True] * 4
    assert len(place.asked()) == 1


async def test_where_it_is_not_allowed_nobody_is_asked(place: Place) -> None:
    await place.come(loads=False)
    assert not await place.load()
    assert not place.asked()


async def test_workers_that_failed_on_the_request_are_not_asked(place: Place) -> None:
    await place.come()
    assert await place.load(ASKED, "w1")
    assert place.holders() == {"w0", "w2"}
    assert not await place.load(ASKED, "w1")


async def test_where_it_failed_it_is_not_tried_again_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.come()

    async def fail(operation: Operation) -> None:
        raise ValueError("no such files")

    for each in place.workers.values():
        each.engine.operating = fail
    assert not await place.load()
    assert not await place.load()
    assert [len(each.engine.operations) for each in place.workers.values()] == [1, 1]
    # Another adapter may be there.
    other = LoRARequest(lora_name="poem", lora_int_id=8, lora_path="/p")
    assert not await place.load(other)
    assert len(place.asked()) == 4
    place.town.fleet._loading._failed.clear()
    monkeypatch.setattr(adapter_loading, "AGAIN_S", 0.0)
    monkeypatch.setattr(adapter_loading, "MOST_TRIED", 1)
    assert not await place.load()
    assert not await place.load()
    assert len(place.asked()) == 6


async def test_what_an_operator_let_go_is_not_loaded_for_requests(place: Place) -> None:
    await place.come()
    shown = place.town.fleet.members.shown()
    everywhere = [each for each in shown if each.card.worker_id != "w0"]
    await perform(everywhere, UnloadLoraAdapter("story"), 60)
    assert not await place.load()
    assert not await place.load()
    assert place.holders() == {"w0"}
    await perform(everywhere, LoadLoraAdapter("story", "/s"), 60)
    await until(lambda: place.holders() == {"w0", "w1", "w2"})


async def test_who_has_another_one_of_that_name_is_not_asked(place: Place) -> None:
    town = place.town
    town.news.say(CardPresent(town.card(adapters=[STORY])))
    other = [Adapter(name="story", path="/other")]
    for name, each in place.workers.items():
        town.news.say(CardPresent(each.card(name, loads_adapters=True, adapters=other)))
    await until(lambda: len(town.router.roster.workers) == 3)
    assert not await place.load()
    assert not place.asked()


async def test_adapters_are_loaded_one_after_the_other_and_so_many_wait(place: Place) -> None:
    await place.come()
    gate = asyncio.Event()
    for each in place.workers.values():
        each.engine.operating = lambda operation: gate.wait()  # type: ignore[assignment,return-value]
    others = [
        LoRARequest(lora_name=f"a{number}", lora_int_id=number + 1, lora_path="/p")
        for number in range(adapter_loading.MOST_WANTED)
    ]
    waiting = [asyncio.create_task(place.load(each)) for each in others]
    await until(lambda: bool(place.asked()))
    assert not await place.load()
    assert len(place.asked()) == 1
    gate.set()
    assert all(await asyncio.gather(*waiting))
    assert await place.load()


async def test_another_worker_loads_it_if_one_is_doing_something_else(place: Place) -> None:
    await place.come()
    gate = asyncio.Event()
    busy = place.workers["w1"].engine
    busy.operating = lambda operation: gate.wait()  # type: ignore[assignment,return-value]
    (member,) = (each for each in place.town.fleet.members.shown() if each.card.worker_id == "w1")
    pausing = asyncio.create_task(perform([member], Pause("keep"), 60))
    await until(lambda: bool(busy.operations))
    assert await place.load()
    assert place.holders() == {"w0", "w2"}
    gate.set()
    await pausing


async def test_a_worker_that_is_lost_meanwhile(place: Place) -> None:
    await place.come()
    lost: list[str] = []

    async def lose(operation: Operation) -> None:
        if not lost:
            lost.extend(name for name, one in place.workers.items() if one.engine.operations)
            place.town.fleet.link(WorkerId(lost[0]))._lose("for the test")

    for each in place.workers.values():
        each.engine.operating = lose
    assert await place.load()
    (left,) = {"w1", "w2"} - {*lost}
    assert left in place.holders()
