"""Whether there is an app that requests can go to.

Until a worker has registered nobody knows the model, so vLLM's app can't exist; the
readiness gate answers 503 in vLLM's error shape. Afterwards it lets everything in, until
the frontend is about to leave. Operators are let in at any time.
"""

from collections.abc import Callable
from http import HTTPStatus

from common.errors import NoWorkerError
from frontend.asgi import App, Arrival, error_answer, unanswered
from frontend.http.operator.app import is_for_operators


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
