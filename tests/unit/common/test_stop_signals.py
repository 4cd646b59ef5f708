import asyncio
import os
import signal

import pytest

from common.stop_signals import StopSignals


async def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    await asyncio.sleep(0)


async def test_sigterm_asks_and_a_second_signal_insists() -> None:
    signals = StopSignals()
    asked = asyncio.create_task(signals.asked())
    await asyncio.sleep(0)
    assert not asked.done()
    await send(signal.SIGTERM)
    await asyncio.wait_for(asked, 10)
    assert not await signals.at_once(0.01)
    await send(signal.SIGTERM)
    assert await signals.at_once(10)


@pytest.mark.parametrize("before", [[], [signal.SIGTERM]])
async def test_sigint_insists(before: list[signal.Signals]) -> None:
    signals = StopSignals()
    for number in (*before, signal.SIGINT):
        await send(number)
    await asyncio.wait_for(signals.asked(), 10)
    assert await signals.at_once(10)
