"""Adapters that workers load for requests. Links and services are real, engines are not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from vllm.lora.request import LoRARequest

from common.discovery.base import CardPresent
from common.identity import Incarnation, WorkerId
from common.request_plane.card import Adapter
from common.request_plane.operations import (
    LoadLoraAdapter,
    Operation,
    Outcome,
    Pause,
    UnloadLoraAdapter,
)
from common.transfer.choice import TransferMode
from frontend.router import LoraKey
from frontend.router.router import Router
from frontend.router.settings import RouterSettings
from frontend.workers import adapter_loading
from frontend.workers.fleet import Fleet
from frontend.workers.media_sender import MediaSender
from frontend.workers.operations import Performed, perform
from tests.fakes.fleet import Town
from tests.waiting import until

STORY = Adapter(name="story", path="/s", base_model_name="base", is_3d_lora_weight=True)
POEM = Adapter(name="poem", path="/p")
KEY = LoraKey("story", "/s")


def lora(adapter: Adapter) -> LoRARequest:
    return LoRARequest(
        lora_name=adapter.name,
        lora_int_id=7,
        lora_path=adapter.path,
        base_model_name=adapter.base_model_name,
        is_3d_lora_weight=adapter.is_3d_lora_weight,
    )


class Place:
    """``w0`` has adapters; ``w1`` and ``w2`` load what a request needs."""

    def __init__(self, town: Town) -> None:
        self.town = town
        self.workers = {"w1": town.start("i1"), "w2": town.start("i2")}

    async def come(self, *others: Adapter, loads: bool = True) -> None:
        town = self.town
        town.news.say(CardPresent(town.card(adapters=[STORY, POEM, *others])))
        for name, each in self.workers.items():
            town.news.say(CardPresent(each.card(name, loads_adapters=loads)))
        await until(lambda: len(town.router.roster.workers) == 3)

    async def load(self, *exclude: str, adapter: Adapter = STORY) -> bool:
        left_out = [WorkerId(name) for name in exclude]
        return await self.town.fleet.load_adapter(lora(adapter), left_out)

    def do(self, act: Callable[[Operation], Awaitable[object]], *names: str) -> None:
        """What engines do first when they are asked for something."""

        async def operating(operation: Operation) -> None:
            await act(operation)

        for name in names or self.workers:
            self.workers[name].engine.operating = operating

    def hold(self, adapter: Adapter = STORY) -> asyncio.Event:
        """Loading it lasts until the event is set."""
        gate = asyncio.Event()

        async def act(operation: Operation) -> None:
            if isinstance(operation, LoadLoraAdapter) and operation.lora_name == adapter.name:
                await gate.wait()

        self.do(act)
        return gate

    async def order(self, operation: Operation, *names: str) -> list[Performed]:
        """As an operator."""
        shown = self.town.fleet.members.shown()
        wanted = [each for each in shown if not names or each.card.worker_id in names]
        return await perform(wanted, operation, 60)

    async def begin(self, adapter: Adapter = STORY) -> tuple["asyncio.Task[bool]", asyncio.Event]:
        """A load that is under way until the event is set."""
        gate = self.hold(adapter)
        loading = asyncio.create_task(self.load(adapter=adapter))
        await until(lambda: len(self.asked()) == 1)
        return loading, gate

    def asked(self) -> list[Operation]:
        return [one for each in self.workers.values() for one in each.engine.operations]

    def loader(self) -> str:
        """Who was asked for something."""
        (name,) = (name for name, each in self.workers.items() if each.engine.operations)
        return name

    def holders(self, key: LoraKey = KEY) -> set[str]:
        workers = self.town.router.roster.workers
        return {name for name, one in workers.items() if key in one.adapters}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    town = Town()
    yield Place(town)
    await town.close()


async def test_one_more_worker_has_it_at_once(place: Place) -> None:
    await place.come()
    assert await place.load()
    assert len(place.holders()) == 2
    assert place.asked() == [
        LoadLoraAdapter(
            "story", "/s", is_3d_lora_weight=True, base_model_name="base", for_request=True
        )
    ]
    (member,) = (
        each for each in place.town.fleet.members.shown() if each.card.worker_id == place.loader()
    )
    assert member.adapters == [STORY]
    assert await place.load()
    assert place.holders() == {"w0", "w1", "w2"}
    assert not await place.load(), "all have it"


async def test_all_who_wait_for_it_load_it_once(place: Place) -> None:
    await place.come()
    gate = place.hold()
    waiting = [asyncio.create_task(place.load()) for _ in range(5)]
    await until(lambda: len(place.asked()) == 1)
    waiting[0].cancel()  # whoever asked first does not take it along
    gate.set()
    assert await asyncio.gather(*waiting[1:]) == [True] * 4
    assert len(place.asked()) == 1


async def test_a_load_that_nobody_waits_for_any_more_goes_on(place: Place) -> None:
    """Else whoever asks and leaves would have it loaded everywhere."""
    await place.come()
    gate = place.hold()
    for _ in range(3):
        asking = asyncio.create_task(place.load())
        await until(lambda: len(place.asked()) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    gate.set()
    await until(lambda: len(place.holders()) == 2)
    assert len(place.asked()) == 1


async def test_who_can_not_go_there_has_it_loaded_elsewhere(place: Place) -> None:
    await place.come()
    first, gate = await place.begin()
    second = asyncio.create_task(place.load(place.loader()))
    await until(lambda: len(place.asked()) == 2)
    assert not await place.load("w1", "w2"), "and who can go nowhere waits for nobody"
    gate.set()
    assert all(await asyncio.gather(first, second))
    assert place.holders() == {"w0", "w1", "w2"}


async def test_one_that_takes_long_holds_up_no_other(place: Place) -> None:
    await place.come()
    slow, gate = await place.begin(POEM)
    busy = place.loader()
    assert await place.load()
    assert place.holders() == {"w0", "w1", "w2"} - {busy}
    assert not await place.load(), "the one that lacks it is loading something else"
    gate.set()
    assert await slow


async def test_where_it_is_not_allowed_nobody_is_asked(place: Place) -> None:
    await place.come(loads=False)
    assert not await place.load()
    assert not place.asked()


async def test_workers_that_failed_on_the_request_are_not_asked(place: Place) -> None:
    await place.come()
    assert await place.load("w1")
    assert place.holders() == {"w0", "w2"}
    assert not await place.load("w1")


@pytest.mark.parametrize(
    "adapter",
    [
        Adapter(name="ghost", path="/nobody/has/it"),
        Adapter(name="story", path="/elsewhere"),
        Adapter(name="hub", path="org/name"),
        Adapter(name="hub", path="../s"),
    ],
    ids=lambda adapter: adapter.path,
)
async def test_only_files_that_others_have_are_loaded(place: Place, adapter: Adapter) -> None:
    """Names on a hub would be downloaded while the engine stands still."""
    await place.come(Adapter(name="hub", path="org/name"))
    assert not await place.load(adapter=adapter)
    assert not place.asked()


async def test_what_its_last_worker_took_along_can_be_loaded_for_a_while(place: Place) -> None:
    await place.come()
    place.town.fleet.link(WorkerId("w0"))._lose("for the test")
    await until(lambda: "story" not in place.town.fleet.adapters.requests)
    assert await place.load("w0")


async def test_where_it_failed_it_is_not_tried_again_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.come()

    async def fail(operation: Operation) -> None:
        raise ValueError("no such files")

    place.do(fail)
    assert await place.load()
    assert await place.load()
    assert not await place.load()
    assert [len(each.engine.operations) for each in place.workers.values()] == [1, 1]
    assert await place.load(adapter=POEM), "that one may be there"
    monkeypatch.setattr(adapter_loading, "AGAIN_S", 0.0)
    place.town.fleet._loading._not_done.clear()
    assert await place.load()
    assert await place.load()
    assert await place.load()


async def test_files_that_take_for_ever_to_read_stop_one_worker_only(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.come()
    gate = place.hold()
    monkeypatch.setattr(adapter_loading, "LOADING_S", 0.05)
    assert await place.load()
    assert not await place.load(), "nobody else is asked for it"
    assert len(place.asked()) == 1
    gate.set()
    await until(lambda: len(place.holders()) == 2)


async def test_a_mistake_of_ours_is_said_and_not_made_again_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.come()

    async def mistake(*_: object) -> list[Performed]:
        raise ZeroDivisionError

    monkeypatch.setattr(adapter_loading, "perform", mistake)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await place.load()
    assert not await place.load()


async def test_what_comes_back_and_is_let_go_was_not_lost(place: Place) -> None:
    await place.come()
    place.town.fleet.link(WorkerId("w0"))._lose("for the test")
    await until(lambda: not place.holders())
    await until(lambda: place.holders() == {"w0"})
    place.town.worker.engine.adapters.known = (STORY, POEM)
    place.town.worker.engine.adapters._requests = {"story": lora(STORY), "poem": lora(POEM)}
    (done,) = await place.order(UnloadLoraAdapter("story"), "w0")
    assert done.outcome is Outcome.DONE
    await until(lambda: not place.holders())
    assert not await place.load()


async def test_what_an_operator_let_go_is_not_loaded_for_requests(place: Place) -> None:
    await place.come()
    await place.order(UnloadLoraAdapter("story"), "w1", "w2")
    assert await place.load()
    assert await place.load()
    assert not await place.load()
    assert place.holders() == {"w0"}
    await place.order(LoadLoraAdapter("story", "/s"), "w1", "w2")
    await until(lambda: place.holders() == {"w0", "w1", "w2"})


async def test_what_is_let_go_everywhere_while_it_is_loaded_is_gone(place: Place) -> None:
    await place.come()
    loading, gate = await place.begin()
    letting_go = asyncio.create_task(place.order(UnloadLoraAdapter("story"), "w1", "w2"))
    gate.set()
    done = await letting_go
    assert Outcome.DONE in {each.outcome for each in done}, "it is not refused for the load"
    await loading
    await until(lambda: place.holders() == {"w0"})
    assert not any(each.engine.adapters.known for each in place.workers.values())


async def test_no_operation_is_refused_since_a_request_needs_an_adapter(place: Place) -> None:
    await place.come()
    loading, gate = await place.begin()
    pausing = asyncio.create_task(place.order(Pause("keep"), "w1", "w2"))
    await until(lambda: len(place.asked()) == 2)
    gate.set()
    assert {each.outcome for each in await pausing} == {Outcome.DONE}
    assert await loading


async def test_what_a_worker_said_meanwhile_is_newer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was loaded, and then let go by an operator of another frontend."""
    await place.come()
    ours = perform

    async def late(*given: object) -> list[Performed]:
        done = await ours(*given)  # type: ignore[arg-type]
        worker = place.workers[place.loader()]
        await until(lambda: len(place.holders()) == 2)
        await worker.service._operations.perform(UnloadLoraAdapter("story"))
        await until(lambda: place.holders() == {"w0"})
        return done

    monkeypatch.setattr(adapter_loading, "perform", late)
    assert await place.load()
    assert place.holders() == {"w0"}


async def test_who_has_another_one_of_that_name_is_not_asked(place: Place) -> None:
    town = place.town
    town.news.say(CardPresent(town.card(adapters=[STORY])))
    other = [Adapter(name="story", path="/other")]
    for name, each in place.workers.items():
        town.news.say(CardPresent(each.card(name, loads_adapters=True, adapters=other)))
    await until(lambda: len(town.router.roster.workers) == 3)
    assert not await place.load()
    assert not place.asked()


async def test_two_frontends_at_the_same_time(place: Place) -> None:
    """One worker may load it: both have it there, though only one of them was first."""
    await place.come()
    sender, router = MediaSender(None, TransferMode.AUTO), Router(RouterSettings())
    other = Fleet(router, sender, Incarnation("g"), "0.32.0")
    for card in [each.card for each in place.town.fleet.members.shown()]:
        other.apply(CardPresent(card))
    await until(lambda: len(router.roster.workers) == 3)
    gate = place.hold()
    loads = [
        asyncio.create_task(place.load("w2")),
        asyncio.create_task(other.load_adapter(lora(STORY), [WorkerId("w2")])),
    ]
    try:
        await until(lambda: bool(place.asked()))
        gate.set()
        assert await asyncio.gather(*loads) == [True, True]
        workers = router.roster.workers
        assert place.holders() == {n for n, one in workers.items() if KEY in one.adapters}
        assert place.holders() == {"w0", "w1"}
    finally:
        await other.close()
        await router.close()
        sender.close()


async def test_a_worker_that_is_lost_meanwhile(place: Place) -> None:
    await place.come()

    async def lose(operation: Operation) -> None:
        place.town.fleet.link(WorkerId(place.loader()))._lose("for the test")

    place.do(lose)
    assert await place.load()
    assert place.holders() == {"w0"}


async def test_a_frontend_that_closes_waits_for_no_load(place: Place) -> None:
    await place.come()
    loading, _ = await place.begin()
    await place.town.fleet.close()
    await loading
    assert not await place.load()
