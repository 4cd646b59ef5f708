"""Tasks that live as long as their process, and what happens when one meets an error.

An error that nobody expected is a mistake of ours, or something like a lack of file handles.
It is logged with its trace and counted in ``mmrouter_task_failures``, and the task goes on
after a pause. No task of this kind ends unseen.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from common.backoff import Backoff
from common.observability.telemetry import TASK_FAILURES

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0

CALM_S: Final = 60.0  # a task that ran for this long begins with the shortest pause again

Work = Callable[[], Awaitable[None]]


async def supervise(
    task: str,
    work: Work,
    *,
    fatal: tuple[type[Exception], ...] = (),
    first_pause_s: float = FIRST_PAUSE_S,
) -> None:
    """Do some work until it returns, and again after every error that nobody expected.

    Args:
        task: what to call it in the metric and on the log: a short constant.
        work: is called for every try, and must not rely on what an earlier one left.
        fatal: errors that are raised, for the owner of the task to act on.
        first_pause_s: before the second try; pauses double up to half a minute.
    """
    backoff = Backoff(first_pause_s, LONGEST_PAUSE_S, calm_s=CALM_S)
    while True:
        started = time.monotonic()
        try:
            await work()
            return
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Something that it waited for was cancelled, and not the task itself.
            pause = backoff.next_s(time.monotonic() - started)
            _report(task, f"trying again in {pause:g} s")
        except fatal:
            raise
        except Exception as error:  # logged with its trace, and counted
            if is_cancelled():  # and failed while it was ending: whoever cancelled it waits
                _report(task, "it was to end anyway")
                raise asyncio.CancelledError from error
            pause = backoff.next_s(time.monotonic() - started)
            _report(task, f"trying again in {pause:g} s")
        await asyncio.sleep(pause)


async def once(task: str, work: Work, failed: Callable[[BaseException], None]) -> None:
    """Do some work that can't be tried again; whoever depends on it gets the error that nobody
    expected."""
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


def note_failure(task: str, ended: "asyncio.Task[None]") -> None:
    """Log and count an error that ended a short task, as its done callback."""
    if not ended.cancelled() and (error := ended.exception()) is not None:
        TASK_FAILURES.labels(task).inc()
        logger.error("%s failed", task, exc_info=error)


def is_cancelled() -> bool:
    """Whether it is this task that was cancelled, and not just something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _report(task: str, then: str) -> None:
    TASK_FAILURES.labels(task).inc()
    logger.exception("%s failed, %s", task, then)


async def stop_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended, however they did."""
    stopping = list(tasks)
    for task in stopping:
        task.cancel()
    await asyncio.gather(*stopping, return_exceptions=True)
