"""Calls of requests wait for places, so that one request does not have all workers' time."""

import asyncio

import pytest

from frontend.http.limits.tenant_limits import CALLS_AT_ONCE, CallLimit
from frontend.request import FaultSettings, batches
from frontend.request.deadlines import Deadlines
from frontend.request_context import EVERYBODY, Tenant, begin
from tests.waiting import until


class Workers:
    """Counts what they have at a time."""

    def __init__(self) -> None:
        self.at_work: dict[str, int] = {}
        self.done = asyncio.Event()

    async def call(self, whose: str) -> None:
        async with batches.place(Deadlines(FaultSettings())):
            self.at_work[whose] = self.at_work.get(whose, 0) + 1
            await self.done.wait()

    async def request(self, places: CallLimit, whose: str, calls: int, tenant: Tenant) -> None:
        context = begin()
        context.tenant = tenant
        with places.of_request(context):
            await asyncio.gather(*(self.call(whose) for _ in range(calls)))


async def test_a_request_has_a_quarter_of_the_places_and_others_get_theirs() -> None:
    places, workers = CallLimit(16, 16), Workers()
    many = asyncio.create_task(workers.request(places, "many", 100, EVERYBODY))
    await until(lambda: workers.at_work.get("many") == 4)
    others = [
        asyncio.create_task(workers.request(places, f"one {number}", 1, EVERYBODY))
        for number in range(12)
    ]
    await until(lambda: len(workers.at_work) == 13)
    assert workers.at_work["many"] == 4
    late = asyncio.create_task(workers.request(places, "late", 1, EVERYBODY))
    for _ in range(20):
        await asyncio.sleep(0)
    assert "late" not in workers.at_work  # all are taken
    workers.done.set()
    await asyncio.gather(many, late, *others)
    assert workers.at_work["many"] == 100 and workers.at_work["late"] == 1


async def test_all_requests_of_a_tenant_have_its_share() -> None:
    places, workers = CallLimit(16, 6), Workers()
    tasks = [
        asyncio.create_task(workers.request(places, "theirs", 50, Tenant("them"))) for _ in range(3)
    ]
    await until(lambda: workers.at_work.get("theirs") == 6)
    tasks.append(asyncio.create_task(workers.request(places, "mine", 2, Tenant("me"))))
    await until(lambda: workers.at_work.get("mine") == 2)
    assert workers.at_work["theirs"] == 6
    workers.done.set()
    await asyncio.gather(*tasks)
    assert workers.at_work == {"theirs": 150, "mine": 2}


async def test_who_leaves_gives_its_places_back() -> None:
    places, workers = CallLimit(4, 4), Workers()
    leaving = asyncio.create_task(workers.request(places, "leaving", 3, EVERYBODY))
    await until(lambda: workers.at_work.get("leaving") == 1)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    staying = [
        asyncio.create_task(workers.request(places, str(number), 1, EVERYBODY))
        for number in range(4)
    ]
    await until(lambda: len(workers.at_work) == 5)
    workers.done.set()
    await asyncio.gather(*staying)


async def test_a_thousand_calls_that_come_together_give_others_their_turn() -> None:
    places, workers = CallLimit(1000, 1000), Workers()
    many = [asyncio.create_task(workers.request(places, "many", 100, EVERYBODY)) for _ in range(10)]
    before, began = 0, []
    while before < 1000:
        await asyncio.sleep(0)
        now = workers.at_work.get("many", 0)
        began.append(now - before)
        before = now
    assert max(began) <= CALLS_AT_ONCE
    workers.done.set()
    await asyncio.gather(*many)
