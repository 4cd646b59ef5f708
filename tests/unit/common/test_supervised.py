import asyncio
import logging

import pytest

from common.aio import supervised
from common.aio.supervised import note_failure, once, supervise
from common.observability.telemetry import TASK_FAILURES


def failures(task: str = "t") -> float:
    return float(TASK_FAILURES.labels(task)._value.get())


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every pause, in seconds. Nobody waits for them."""
    asked: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        await real(0)

    monkeypatch.setattr("common.aio.supervised.asyncio.sleep", sleep)
    return asked


async def test_an_unexpected_error_is_logged_counted_and_tried_again(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    before, tries = failures(), 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries < 10:
            raise OSError(24, "Too many open files")

    await supervise("t", work)
    assert tries == 10 and failures() == before + 9
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert all(record.exc_info for record in caplog.records)


async def test_after_a_calm_time_pauses_are_short_again(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("common.aio.supervised.time.monotonic", lambda: now)
    tries = 0

    async def work() -> None:
        nonlocal now, tries
        tries += 1
        now += supervised.CALM_S + 1 if tries == 3 else 0
        if tries < 5:
            raise RuntimeError

    await supervise("t", work)
    assert pauses == [0.5, 1, 0.5, 1]


async def test_a_task_that_fails_while_it_is_cancelled_is_not_begun_again() -> None:
    """Whoever cancelled it waits for its end."""
    before, tries = failures(), 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError(24, "Too many open files")

    task = asyncio.create_task(supervise("t", work))
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and tries == 1 and failures() == before + 1


async def test_errors_that_the_owner_acts_on_are_raised() -> None:
    async def work() -> None:
        raise KeyError("fatal")

    before = failures()
    with pytest.raises(KeyError):
        await supervise("t", work, fatal=(LookupError,))
    assert failures() == before


@pytest.mark.parametrize("runner", ["supervise", "once"])
async def test_a_cancelled_task_ends(runner: str) -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    before = failures()
    failed: list[BaseException] = []
    watched = supervise("t", work) if runner == "supervise" else once("t", work, failed.append)
    task = asyncio.create_task(watched)
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert failures() == before and not failed
    # Also before it began.
    task = asyncio.create_task(supervise("t", work))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_somebody_elses_cancellation_ends_no_task() -> None:
    """As when a socket is closed: whoever waits for a message is told so by cancellation."""
    tries = 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waited_for.cancel()
            await waited_for

    before = failures()
    await supervise("t", work)
    assert tries == 2 and failures() == before + 1


async def test_what_can_not_be_tried_again_says_so() -> None:
    async def work() -> None:
        raise RuntimeError("a mistake")

    before = failures()
    failed: list[BaseException] = []
    await once("t", work, failed.append)
    assert [str(error) for error in failed] == ["a mistake"] and failures() == before + 1


async def test_short_tasks_are_not_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise RuntimeError("a mistake")

    before = failures()
    task = asyncio.create_task(work())
    task.add_done_callback(lambda ended: note_failure("t", ended))
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert failures() == before + 1
    assert "a mistake" in logging.Formatter().format(caplog.records[-1])
