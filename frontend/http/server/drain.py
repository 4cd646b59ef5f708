"""How a frontend leaves: nobody gets in any more, and those who are in may finish.

The listener is closed at once. Streams have ``--drain-timeout`` to finish; what is left
then, or when a second signal comes, ends with an error event.
"""

import asyncio
import logging

import uvicorn

from common.aio.processes import StopSignals
from frontend.http.server.readiness_gate import ReadinessGate
from frontend.workers import Fleets

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""How long the errors of requests that were given up may take to reach their clients."""


async def graceful_shutdown(
    signals: StopSignals,
    server: uvicorn.Server,
    gate: ReadinessGate,
    fleets: Fleets,
    timeout_s: float,
) -> None:
    """Wait for a signal, then bring ``server.serve()`` to its end.

    Args:
        timeout_s: how long requests may take to finish.
    """
    await signals.asked()
    gate.close_for_good()
    server.should_exit = True
    logger.info("draining, %d requests are left", len(server.server_state.tasks))
    await signals.at_once(timeout_s)
    logger.warning("%d requests are given up", len(server.server_state.tasks))
    await fleets.close()  # every request now fails, in its own words
    tasks = set(server.server_state.tasks)
    if tasks:
        _, tasks = await asyncio.wait(tasks, timeout=LAST_WORDS_S)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=LAST_WORDS_S)
    # uvicorn answers a cancellation with 500, and waits until a client that doesn't read what
    # came before takes that too.
    for connection in list(server.server_state.connections):
        if connection.transport is not None:
            connection.transport.abort()
    if tasks:
        await asyncio.wait(tasks, timeout=LAST_WORDS_S)
    server.force_exit = True
