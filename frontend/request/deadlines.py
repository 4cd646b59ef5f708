"""Deadlines of a request, and of a worker's next output."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from common.errors import DeadlineExceededError, OutputTimeoutError
from common.identity import WorkerId
from common.observability.telemetry import DEADLINES_EXCEEDED
from frontend.request.settings import FaultSettings
from frontend.workers import Answer


class Deadlines:
    """Deadlines of one request, from the moment it was created."""

    def __init__(self, settings: FaultSettings) -> None:
        self._total_s = settings.request_timeout_s
        self._output_s = settings.output_timeout_s
        self._end = time.monotonic() + self._total_s if self._total_s else None

    @property
    def for_outputs(self) -> bool:
        """Whether each output of a worker has a deadline."""
        return bool(self._output_s)

    def left_s(self) -> float | None:
        """Return the seconds left, at least 0; None without a deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def watch(self, worker_id: WorkerId, answers: AsyncGenerator[Answer]) -> AsyncGenerator[Answer]:
        """Yield a worker's answers. Closes ``answers``, so a worker that is late is told to stop.

        Raises:
            DeadlineExceededError: the request took too long.
            OutputTimeoutError: the worker was silent for too long; another one may do it.
        """
        if self._end is None and not self._output_s:
            return answers  # by far the most common, and a timer at each token costs
        return self._in_time(worker_id, answers)

    def late(self) -> DeadlineExceededError:
        """Count and return the error of a request that took too long."""
        DEADLINES_EXCEEDED.labels("request").inc()
        return DeadlineExceededError(f"the request was not done within {self._total_s:g} s")

    async def _in_time(
        self, worker_id: WorkerId, answers: AsyncGenerator[Answer]
    ) -> AsyncGenerator[Answer]:
        async with aclosing(answers):
            while True:
                left = self.left_s()
                ours_first = left is not None and left <= (self._output_s or left)
                try:
                    async with asyncio.timeout(left if ours_first else self._output_s or None):
                        answer = await anext(answers, None)
                except TimeoutError as error:
                    if ours_first:
                        raise self.late() from error
                    DEADLINES_EXCEEDED.labels("output").inc()
                    raise OutputTimeoutError(
                        f"worker {worker_id} said nothing on the request for {self._output_s:g} s"
                    ) from error
                if answer is None:
                    return
                yield answer
