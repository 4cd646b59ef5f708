import asyncio
import threading

import pytest

from common.aio.cleanup import made_in_thread, undo_on_error
from tests.waiting import until


def test_nothing_is_undone_where_all_went_well() -> None:
    undone: list[int] = []
    with undo_on_error(lambda: undone.append(1)):
        pass
    assert not undone


def test_an_error_goes_on_once_it_is_undone() -> None:
    undone: list[int] = []
    with pytest.raises(KeyError), undo_on_error(lambda: undone.append(1)):
        raise KeyError
    assert undone == [1]


async def test_so_does_a_cancellation() -> None:
    undone: list[int] = []

    async def work() -> None:
        with undo_on_error(lambda: undone.append(1)):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == [1]


async def test_what_a_thread_makes_is_undone_if_nobody_waits_for_it() -> None:
    go, undone = threading.Event(), list[str]()

    def make() -> str:
        go.wait(60)
        return "made"

    assert await made_in_thread(lambda: "made", undone.append) == "made"
    waiting = asyncio.create_task(made_in_thread(make, undone.append))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not undone
    go.set()
    await until(lambda: undone == ["made"])


async def test_an_error_of_the_thread_is_raised_and_nothing_undone() -> None:
    undone: list[None] = []

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        await made_in_thread(fail, undone.append)
    assert not undone
