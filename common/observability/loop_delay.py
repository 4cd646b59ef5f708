"""How late the event loop is: whoever waits on it waits that much longer."""

import asyncio
import time
from typing import Final

from common.observability.telemetry import EVENT_LOOP_DELAY

INTERVAL_S: Final = 0.25
"""How often it is looked. What blocks for longer is seen whole, what is shorter now and then."""


async def measure_loop_delay() -> None:
    """Observe it until cancelled."""
    while True:
        due = time.perf_counter() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        EVENT_LOOP_DELAY.observe(max(0.0, time.perf_counter() - due))
