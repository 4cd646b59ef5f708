"""Readiness: whether there is an app that requests can go to.

Only a worker knows the model that vLLM's app needs: until one has joined, and while the frontend
drains, requests get 503. Operators are always let in.

The listener closes as soon as the frontend drains. Streams have ``--drain-timeout`` to finish; at
its end, or at a second signal, the rest ends with an error event.
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
"""Seconds that errors of abandoned requests may take to reach their clients."""


class ReadinessGate:
    """Answer 503 until :meth:`let_in`, and again after :meth:`close_for_good`."""

    def __init__(self, reason: Callable[[], None], operators: App = unanswered) -> None:
        """``reason`` raises NoWorkerError without workers; ``operators`` serves without a model."""
        self._reason = reason
        self._operators = operators
        self._app: App | None = None
        self._leaving = False

    def let_in(self, app: App | None) -> None:
        """Let requests in to a started app; None to let none in until the next one."""
        self._app = app

    def close_for_good(self) -> None:
        """Answer 503 to new requests; running ones may finish."""
        self._leaving = True

    async def __call__(self, arrival: Arrival) -> App | None:
        """Set the app of a request, or return a 503."""
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
    """Wait for a signal, then end ``server.serve()``; requests have ``timeout_s`` to finish."""
    await signals.asked()
    gate.close_for_good()
    fleets.drain()
    server.should_exit = True
    logger.info("draining, %d requests are left", len(server.server_state.tasks))
    await signals.at_once(timeout_s)
    if left := len(server.server_state.tasks):
        logger.warning("ending %d requests that --drain-timeout leaves no more time", left)
    await fleets.close()  # every request now fails, with its own error
    tasks = set(server.server_state.tasks)
    if tasks:
        _, tasks = await asyncio.wait(tasks, timeout=LAST_WORDS_S)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=LAST_WORDS_S)
    # uvicorn answers a cancellation with 500, and would wait for a client that doesn't read.
    for connection in list(server.server_state.connections):
        if connection.transport is not None:
            connection.transport.abort()
    if tasks:
        await asyncio.wait(tasks, timeout=LAST_WORDS_S)
    server.force_exit = True
