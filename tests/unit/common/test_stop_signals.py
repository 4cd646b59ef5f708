"""What signals mean. That they arrive is seen end to end: here they could end the tests."""

import asyncio
import os
import signal

import pytest

from common.aio.processes import StopSignals
from tests.waiting import until


async def test_sigterm_asks_and_a_second_signal_insists() -> None:
    signals = StopSignals()
    asked = asyncio.create_task(signals.asked())
    await asyncio.sleep(0)
    assert not asked.done()
    signals.terminate()
    await asyncio.wait_for(asked, 60)
    assert not await signals.at_once(0.01)
    signals.terminate()
    assert await signals.at_once(10)


async def test_sigint_insists() -> None:
    signals = StopSignals()
    signals.interrupt()
    await asyncio.wait_for(signals.asked(), 60)
    assert await signals.at_once(10)


async def test_sigint_hurries_what_drains() -> None:
    signals = StopSignals()
    signals.terminate()
    waiting = asyncio.create_task(signals.at_once(60))
    await asyncio.sleep(0)
    signals.interrupt()
    assert await asyncio.wait_for(waiting, 60)


async def test_sighup_is_no_reload_that_cuts_streams(caplog: pytest.LogCaptureFixture) -> None:
    signals = StopSignals()
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: "SIGHUP changes nothing" in caplog.text)
    assert not signals.is_asked


async def test_a_terminal_that_goes_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: True)
    signals = StopSignals()
    for _ in range(2):  # by the shell, and by the parent of a worker
        signals.hang_up()
    assert signals.is_asked
    assert not await signals.at_once(0.01)
