"""Operations and metrics requests to all workers at once, with a time-out for each worker."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from common.errors import WorkerBusyError, WorkerLostError
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import WORKER_PAGES_MISSING
from common.request_plane.operations import Operation, Outcome
from frontend.workers.members import Member, Roll

AT_ONCE: Final = 256
"""Workers asked concurrently."""


@dataclass(frozen=True)
class Performed:
    """Outcome of an operation at one run of a worker: failed if it did not answer; a refused one
    did nothing. ``message`` is the reason, if any.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    outcome: Outcome
    message: str
    seconds: float


def those_called(members: Roll, worker_id: WorkerId | None) -> list[Member]:
    """Return the worker of an id, preferring the serving member; all workers without an id."""
    shown = members.shown()
    if worker_id is None:
        return shown
    holder = members.holder(worker_id)
    if holder is not None:
        return [holder]
    return [member for member in shown if member.card.worker_id == worker_id][:1]


async def perform(
    members: Iterable[Member], operation: Operation, timeout_s: float
) -> list[Performed]:
    """Run an operation on workers concurrently, with a time-out for each; keep their order."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(member: Member) -> Performed:
        async with turns:
            return await _perform(member, operation, timeout_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(member), name="operation") for member in members]
    return [task.result() for task in tasks]


async def _perform(member: Member, operation: Operation, timeout_s: float) -> Performed:
    began = time.monotonic()
    outcome, message = Outcome.FAILED, ""
    try:
        async with asyncio.timeout(timeout_s):
            if member.link is None:
                outcome, message = Outcome.REFUSED, "it is not connected"
            else:
                answer = await member.link.operate(operation)
                outcome, message = answer.outcome, answer.message
    except TimeoutError:
        message = f"it did not answer in {timeout_s:g} s, and may still do it"
    except WorkerBusyError as error:
        outcome, message = Outcome.REFUSED, str(error)
    except WorkerLostError as error:
        message = f"{error}; it is unknown whether it was done"
    seconds = round(time.monotonic() - began, 3)
    return Performed(member.card.worker_id, member.card.incarnation, outcome, message, seconds)


PAGE_TIMEOUT_S: Final = 2.0
"""Time-out for a worker's metrics."""

MAX_PAGES: Final = 16
"""Workers asked for metrics concurrently: as many pages are held in memory."""

MAX_PAGES_BYTES: Final = 64 << 20
"""Limit of all pages of one scrape."""


class WorkerPage(NamedTuple):
    worker_id: WorkerId
    text: bytes


async def ask_for_pages(members: Roll, take: Callable[[WorkerPage], Awaitable[None]]) -> None:
    """Ask all serving workers for their metrics; count missing pages by reason. ``take`` gets the
    pages in any order, several at a time; its errors are raised in a group.
    """
    slots, left = asyncio.Semaphore(MAX_PAGES), MAX_PAGES_BYTES

    async def ask(member: Member) -> None:
        nonlocal left
        async with slots:
            page, missing = await _page(member)
            left -= len(page)
            if left < 0:
                missing = "no_room"
            if missing:
                WORKER_PAGES_MISSING.labels(missing).inc()
            else:
                await take(WorkerPage(member.card.worker_id, page))

    async with asyncio.TaskGroup() as group:
        for member in members.available():
            group.create_task(ask(member), name="worker metrics")


async def _page(member: Member) -> tuple[bytes, str]:
    try:
        async with asyncio.timeout(PAGE_TIMEOUT_S):
            page = b"" if member.link is None else await member.link.figures()
    except TimeoutError:
        return b"", "silent"
    except (WorkerBusyError, WorkerLostError):
        return b"", "lost"
    return page, "" if page else "lost" if member.link is None else "too_large"
