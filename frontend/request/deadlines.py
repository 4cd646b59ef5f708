"""How long a request may take, and how long a worker may say nothing about it."""

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
    """Those of one request, from the moment it was made."""

    def __init__(self, settings: FaultSettings) -> None:
        self._total_s = settings.request_timeout_s
        self._output_s = settings.output_timeout_s
        self._end = time.monotonic() + self._total_s if self._total_s else None

    @property
    def for_outputs(self) -> bool:
        """Whether a worker may be late with a single output."""
        return bool(self._output_s)

    def left_s(self) -> float | None:
        """Seconds until the request is late, at least 0; None if it never is."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def watch(self, worker_id: WorkerId, answers: AsyncGenerator[Answer]) -> AsyncGenerator[Answer]:
        """The answers of a worker, each in time. Closes ``answers``, so a worker that is
        late is told to stop.

        Raises:
            DeadlineExceededError: the request took too long.
            OutputTimeoutError: the worker said nothing for too long; another may.
        """
        if self._end is None and not self._output_s:
            return answers  # by far the most common, and a timer at each token costs
        return self._in_time(worker_id, answers)

    def late(self) -> DeadlineExceededError:
        """The error of a request that took too long, counted."""
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
