"""Supervise tasks that live as long as their process.

An unexpected error is a bug or an exhausted resource, such as file handles. It is logged with its
trace and counted in ``mmrouter_task_failures``, and the task restarts after a backoff. No
supervised task ends unnoticed.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from common.backoff import Backoff
from common.observability.telemetry import TASK_FAILURES

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0

CALM_S: Final = 60.0  # a task that ran for this long begins with the shortest pause again

Work = Callable[[], Awaitable[None]]


async def supervise(
    task: str,
    work: Work,
    *,
    fatal: tuple[type[Exception], ...] = (),
    first_pause_s: float = FIRST_PAUSE_S,
) -> None:
    """Run ``work`` until it returns; restart it after every unexpected error.

    Args:
        task: name in the metric and the log: a short constant.
        work: called for every try; must not rely on state of an earlier one.
        fatal: errors that are raised, for the owner of the task to act on.
        first_pause_s: before the second try; pauses double up to half a minute.
    """
    backoff = Backoff(first_pause_s, MAX_PAUSE_S, calm_s=CALM_S)
    while True:
        started = time.monotonic()
        try:
            await work()
            return
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # A future that it awaited was cancelled, not the task itself.
            pause = backoff.next_s(time.monotonic() - started)
            _report(task, f"trying again in {pause:g} s")
        except fatal:
            raise
        except Exception as error:  # logged with its trace, and counted
            if is_cancelled():  # and failed while it was ending: its canceller waits
                _report(task, "it was to end anyway")
                raise asyncio.CancelledError from error
            pause = backoff.next_s(time.monotonic() - started)
            _report(task, f"trying again in {pause:g} s")
        await asyncio.sleep(pause)


async def once(task: str, work: Work, failed: Callable[[BaseException], None]) -> None:
    """Run ``work`` that can't be retried; pass an unexpected error to ``failed``."""
    try:
        await work()
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        _report(task, "giving it up")
        failed(error)
    except Exception as error:  # noqa: BLE001  # logged with its trace, and counted
        _report(task, "giving it up")
        failed(error)


def note_failure(task: str, ended: "asyncio.Future[Any]") -> None:
    """Log and count the error of a short task, or of work in a thread, as its done callback."""
    if not ended.cancelled() and (error := ended.exception()) is not None:
        TASK_FAILURES.labels(task).inc()
        logger.error("%s failed", task, exc_info=error)


def is_cancelled() -> bool:
    """Return whether this task was cancelled, not only a future that it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _report(task: str, then: str) -> None:
    TASK_FAILURES.labels(task).inc()
    logger.exception("%s failed, %s", task, then)


async def stop_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end, ignoring their errors."""
    stopping = list(tasks)
    for task in stopping:
        task.cancel()
    await asyncio.gather(*stopping, return_exceptions=True)
