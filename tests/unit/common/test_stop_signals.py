"""What signals mean. That they arrive is seen end to end: here they could end the tests."""

import asyncio

from common.aio.processes import StopSignals


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
