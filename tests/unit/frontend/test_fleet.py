"""Who gets into the fleet, with a watcher of our own and a worker that answers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backend_worker.obtain import MediaInlet
from backend_worker.service import WorkerService
from common.card import WorkerCard, WorkerState
from common.discovery.base import CardChange, CardGone, CardPresent, CardWatcher
from common.errors import NoWorkerError, WorkerLeftError, WorkerLostError
from common.identity import Incarnation, WorkerId
from common.transfer.choice import TransferMode
from frontend.fleet import Fleet
from frontend.media import MediaLender
from frontend.router.ejection import Standing
from frontend.router.router import Router
from frontend.router.settings import RouterSettings
from tests.unit.common.cards import make_card
from tests.unit.test_request_plane import ScriptedEngine, no_rendering
from tests.waiting import until


class Announcements(CardWatcher):
    """Changes as a test makes them."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[CardChange] = asyncio.Queue()

    def say(self, change: CardChange) -> None:
        self._queue.put_nowait(change)

    async def changes(self) -> AsyncIterator[CardChange]:
        while True:
            yield await self._queue.get()


class Town:
    """A fleet, and one worker that cards may point at."""

    def __init__(self) -> None:
        self.news = Announcements()
        self.router = Router(RouterSettings())
        self.lender = MediaLender(None, TransferMode.AUTO)
        self.fleet = Fleet(self.news, self.router, self.lender, Incarnation("f"), "0.32.0")
        self.service = WorkerService(
            ScriptedEngine(),
            MediaInlet(None, no_rendering),
            WorkerId("w0"),
            Incarnation("i0"),
            "tcp://127.0.0.1:0",
        )
        self.tasks = [
            asyncio.create_task(self.service.run()),
            asyncio.create_task(self.fleet.run()),
        ]

    def card(self, worker_id: str = "w0", **changes: Any) -> WorkerCard:
        return make_card(worker_id, request_endpoint=self.service.endpoint, **changes)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.fleet.close()
        await self.router.close()
        await self.service.close()
        self.lender.close()


@pytest.fixture
async def town() -> AsyncIterator[Town]:
    town = Town()
    yield town
    await town.close()


async def test_nobody_is_there_at_first(town: Town) -> None:
    assert not town.fleet.connected
    with pytest.raises(NoWorkerError, match="none has registered"):
        town.fleet.check_available()


async def test_a_worker_joins_and_leaves(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    assert (await town.fleet.contract()).worker_id == "w0"
    await until(lambda: town.fleet.connected)
    assert town.fleet.link(WorkerId("w0")).card == town.card()
    assert town.router.targets()
    town.news.say(CardGone(WorkerId("w0")))
    await until(lambda: not town.fleet.connected)
    assert town.router.targets() == []
    with pytest.raises(WorkerLostError):
        town.fleet.link(WorkerId("w0"))


async def test_another_version_of_vllm_never_becomes_the_contract(town: Town) -> None:
    town.news.say(CardPresent(town.card("old", vllm_version="0.31.0")))
    await until(lambda: bool(town.fleet.refused()))
    assert "vllm_version" in town.fleet.refused()[WorkerId("old")]
    with pytest.raises(NoWorkerError, match=r"0\.31\.0"):
        town.fleet.check_available()
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)


async def test_the_second_card_must_agree_with_the_first(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    town.news.say(CardPresent(town.card("w1", cache={"block_size": 16})))
    await until(lambda: bool(town.fleet.refused()))
    assert "cache.block_size is 16" in town.fleet.refused()[WorkerId("w1")]
    town.news.say(CardGone(WorkerId("w1")))
    await until(lambda: not town.fleet.refused())


async def test_a_draining_worker_gets_no_more_requests_but_keeps_its_link(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    town.news.say(CardPresent(town.card(state=WorkerState.DRAINING)))
    await until(lambda: not town.fleet.connected)
    assert town.router.targets() == []
    assert town.fleet.link(WorkerId("w0")).active_requests == 0


async def test_a_worker_that_restarts_in_place_is_a_new_one(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    town.news.say(CardPresent(town.card(incarnation="i1")))
    await until(lambda: not town.fleet.connected)
    # Nobody of that incarnation answers there, so it stays out.
    assert [member.link for member in town.fleet.members()] == [None]


async def test_a_lost_worker_is_connected_again(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    link = town.fleet.link(WorkerId("w0"))
    link._lose("for the test")
    await until(lambda: not town.fleet.connected)
    await until(lambda: town.fleet.connected)
    assert town.fleet.link(WorkerId("w0")) is not link


async def test_a_lost_worker_is_not_trusted_at_once_and_one_that_left_is(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    for kind, standing in ((WorkerLeftError, Standing.IN), (WorkerLostError, Standing.OUT)):
        link = town.fleet.link(WorkerId("w0"))
        link._lose("for the test", kind)
        await until(lambda: not town.fleet.connected)
        assert town.router.standing(WorkerId("w0"))[0] is standing
        await until(lambda: town.fleet.connected)


async def test_a_draining_worker_that_is_connected_again_still_gets_nothing(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    town.news.say(CardPresent(town.card(state=WorkerState.DRAINING)))
    await until(lambda: not town.fleet.connected)
    link = town.fleet.link(WorkerId("w0"))
    link._lose("for the test")
    (member,) = town.fleet.members()
    await until(lambda: member.link not in (None, link))
    assert town.router.targets() == []


async def test_a_closed_fleet_says_that_it_is_closed(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    await town.fleet.close()
    with pytest.raises(NoWorkerError, match="shutting down"):
        town.fleet.check_available()
