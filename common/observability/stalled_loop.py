"""How late the event loop is, and which request holds it while it stands."""

import asyncio
import logging
import signal
import time
from types import FrameType
from typing import Final

from common.observability.log_lines import current_request
from common.observability.telemetry import EVENT_LOOP_DELAY, EVENT_LOOP_STALLS
from common.observability.thread_watchdog import STALL_S, stack_of

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.25
"""How often it is looked. What blocks for longer is seen whole, what is shorter now and then."""


async def measure_loop_delay() -> None:
    """Observe how late the loop is, which everything that waits on it is too, until cancelled."""
    while True:
        due = time.perf_counter() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        EVENT_LOOP_DELAY.observe(max(0.0, time.perf_counter() - due))


async def watch_for_stalls(stall_s: float = STALL_S) -> None:
    """Log and count each time that the loop of the main thread stands longer, until cancelled.

    A timer of the process is set anew by each turn of the loop. If it goes off, its handler runs in
    the context of what holds the loop, so it knows that request; a thread would not.
    """
    before = signal.signal(signal.SIGALRM, _tell)
    try:
        while True:
            signal.setitimer(signal.ITIMER_REAL, INTERVAL_S + stall_s)
            await asyncio.sleep(INTERVAL_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _tell(_: int, frame: FrameType | None) -> None:
    EVENT_LOOP_STALLS.inc()
    logger.warning(
        "request %s holds the event loop, so no other request goes on: %s",
        current_request.get() or "(none)",
        stack_of(frame),
    )
