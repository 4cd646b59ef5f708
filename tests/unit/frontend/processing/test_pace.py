"""How long a medium would wait for its turn."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

import pytest

from frontend.processing.batch import Batch, Processed
from frontend.processing.pace import Pace
from tests.unit.frontend.processing.media import batch_of, image
from tests.waiting import until


class OneAtATime:
    """A backend over a clock of the test's."""

    width = 1

    def __init__(self) -> None:
        self.now = 100.0
        self.turns = asyncio.Semaphore(0)
        self.fails = False

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        await self.turns.acquire()
        if self.fails:
            raise ValueError("no good")
        return []


async def test_what_waits_takes_as_long_as_what_came_before() -> None:
    inner = OneAtATime()
    pace = Pace(inner, lambda: inner.now)
    assert pace.width == 1
    inner.now += 50  # nobody is waiting
    tasks = [asyncio.create_task(pace.run(batch_of(image("a")), bool)) for _ in range(4)]
    await asyncio.sleep(0)
    assert pace.wait_ms == 0  # it has processed nothing yet
    for number in range(4):
        inner.now += 0.02
        inner.turns.release()
        await until(partial(_have_ended, tasks, number + 1))
        assert pace.wait_ms == pytest.approx((3 - number) * 20)
    inner.now += 1000  # an idle hour says nothing
    last = asyncio.create_task(pace.run(batch_of(image("a"), image("b")), bool))
    await asyncio.sleep(0)
    assert pace.wait_ms == pytest.approx(40)
    last.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await last
    assert pace.wait_ms == 0


def _have_ended(tasks: list[asyncio.Task[list[Processed]]], count: int) -> bool:
    return sum(task.done() for task in tasks) >= count


async def test_what_fails_took_time_too() -> None:
    inner = OneAtATime()
    pace = Pace(inner, lambda: inner.now)
    inner.fails = True
    task = asyncio.create_task(pace.run(batch_of(image("a")), bool))
    await asyncio.sleep(0)
    inner.now += 0.03
    inner.turns.release()
    with pytest.raises(ValueError, match="no good"):
        await task
    waits = asyncio.create_task(pace.run(batch_of(image("a")), bool))
    await asyncio.sleep(0)
    assert pace.wait_ms == pytest.approx(30)
    waits.cancel()
