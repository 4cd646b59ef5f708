import asyncio

import pytest

from common.undo import undo_on_error


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
