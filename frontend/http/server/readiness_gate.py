"""Whether there is an app that requests can go to.

Until a worker has registered nobody knows the model, so vLLM's app can't exist; the
readiness gate answers 503 in vLLM's error shape. Afterwards it lets everything in, until
the frontend is about to leave. Operators are let in at any time.

When it leaves, the listener is closed at once. Streams have ``--drain-timeout`` to finish; what is
left then, or when a second signal comes, ends with an error event.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

import uvicorn

from common.aio.processes import StopSignals
from common.errors import NoWorkerError
from frontend.asgi import App, Arrival, error_answer, unanswered
from frontend.http.operator.app import is_for_operators
from frontend.workers import Fleets

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""How long the errors of requests that were given up may take to reach their clients."""


class ReadinessGate:
    """503 until :meth:`let_in`, then vLLM's app, then 503 again."""

    def __init__(self, reason: Callable[[], None], operators: App = unanswered) -> None:
        """
        Args:
            reason: raises NoWorkerError if nobody is there.
            operators: an app for them, for when there is no other.
        """
        self._reason = reason
        self._operators = operators
        self._app: App | None = None
        self._leaving = False

    def let_in(self, app: App | None) -> None:
        """Let requests in to an app that was started; None to let nobody in until the next one."""
        self._app = app

    def close_for_good(self) -> None:
        """Answer 503 to whoever comes from now on; those who are in may finish."""
        self._leaving = True

    async def __call__(self, arrival: Arrival) -> App | None:
        """Say where a request goes, or return a 503."""
        if self._app is not None and not self._leaving:
            arrival.app = self._app
            return None
        if arrival.scope["type"] == "http" and is_for_operators(arrival.path):
            arrival.app = self._operators
            return None
        return self._closed(arrival) if arrival.scope["type"] == "http" else unanswered

    def _closed(self, arrival: Arrival) -> App:
        message = "the first worker has registered and its model is being loaded"
        headers = {"Retry-After": "1"}
        if self._leaving or arrival.has_body:  # which isn't read
            headers["Connection"] = "close"
        if self._leaving:
            message = "this frontend is shutting down"
        else:
            try:
                self._reason()
            except NoWorkerError as error:
                message = str(error)
        return error_answer(message, HTTPStatus.SERVICE_UNAVAILABLE, headers)


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
    if left := len(server.server_state.tasks):
        logger.warning("ending %d requests that --drain-timeout leaves no more time", left)
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
