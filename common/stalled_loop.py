"""Tell which request holds the event loop, and where, while it does."""

import asyncio
import logging
import signal
import traceback
from types import FrameType
from typing import Final

from common.log_lines import current_request
from common.telemetry import EVENT_LOOP_STALLS

logger = logging.getLogger(__name__)

STALL_S: Final = 1.0
INTERVAL_S: Final = 0.25
MAX_FRAMES: Final = 12


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
    places = traceback.extract_stack(frame)[-MAX_FRAMES:]
    logger.warning(
        "request %s holds the event loop, so no other request goes on: %s",
        current_request.get() or "(none)",
        " > ".join(f"{place.filename}:{place.lineno} {place.name}" for place in places),
    )
