"""One call for all who ask at the same time, whoever of them stays."""

import asyncio
import gc

import pytest

from frontend.fetch.single_flight import SingleFlight


class Call:
    """A call that ends when told."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> str:
        self.started += 1
        try:
            return await asyncio.shield(self.result)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def board(flights: SingleFlight[str], call: Call, n: int) -> list[asyncio.Task[object]]:
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(flights.run("key", call)) for _ in range(n)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_one_call_for_all() -> None:
    flights, call = SingleFlight[str](), Call()
    tasks = await board(flights, call, 5)
    assert call.started == 1 and len(flights) == 1 and "key" in flights
    call.result.set_result("done")
    assert await asyncio.gather(*tasks) == [("done", True)] * 5
    assert len(flights) == 0


async def test_alone() -> None:
    flights, call = SingleFlight[str](), Call()
    call.result.set_result("done")
    assert await flights.run("key", call) == ("done", False)


async def test_other_keys_are_other_calls() -> None:
    flights, call = SingleFlight[str](), Call()
    call.result.set_result("done")
    await asyncio.gather(*(flights.run(n, call) for n in range(3)))
    assert call.started == 3


async def test_nothing_is_remembered() -> None:
    flights, call = SingleFlight[str](), Call()
    call.result.set_result("done")
    for n in range(3):
        await flights.run("key", call)
        assert call.started == n + 1


async def test_a_failure_is_everybodys_and_is_not_kept() -> None:
    flights, call = SingleFlight[str](), Call()
    tasks = await board(flights, call, 3)
    call.result.set_exception(ValueError("broken"))
    for task in tasks:
        with pytest.raises(ValueError, match="broken"):
            await task
    fresh = Call()
    fresh.result.set_result("done")
    assert await flights.run("key", fresh) == ("done", False)


async def test_who_is_cancelled_leaves_the_others_to_it() -> None:
    flights, call = SingleFlight[str](), Call()
    first, *others = await board(flights, call, 3)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert call.cancelled == 0
    call.result.set_result("done")
    assert await asyncio.gather(*others) == [("done", True)] * 2


async def test_the_last_one_cancelled_cancels_the_call() -> None:
    before = asyncio.all_tasks()
    flights, call = SingleFlight[str](), Call()
    tasks = await board(flights, call, 3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert call.cancelled == 1 and len(flights) == 0
    assert asyncio.all_tasks() == before


async def test_nobody_joins_a_call_that_is_being_cancelled() -> None:
    flights, call, fresh = SingleFlight[str](), Call(), Call()
    (task,) = await board(flights, call, 1)
    task.cancel()
    fresh.result.set_result("fresh")
    await asyncio.sleep(0)
    assert await flights.run("key", fresh) == ("fresh", False)


async def test_a_failure_that_nobody_is_there_to_see(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail_when_cancelled() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("broken")

    flights = SingleFlight[str]()
    task = asyncio.create_task(flights.run("key", fail_when_cancelled))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    del task
    gc.collect()
    assert not caplog.records


async def test_closing_cancels_everything() -> None:
    flights, call = SingleFlight[str](), Call()
    tasks = await board(flights, call, 2)
    await flights.close()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks) and call.cancelled == 1
