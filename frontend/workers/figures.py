"""What workers say of themselves, asked of all at once. Nobody waits for one that is silent."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from common.errors import WorkerBusyError, WorkerLostError
from common.identity import WorkerId
from common.observability.telemetry import WORKER_PAGES_MISSING
from frontend.workers.members import Member, Roll

ANSWER_S: Final = 2.0
"""How long a worker may take."""

AT_ONCE: Final = 16
"""Workers that are asked at the same time: as many pages are held, as they came."""

MOST_BYTES: Final = 64 << 20
"""Of all pages together."""


class WorkerPage(NamedTuple):
    """A worker's own metrics.

    Attributes:
        text: as it came; nothing of it is certain.
    """

    worker_id: WorkerId
    text: bytes


class WorkerPages:
    """Asks all workers that serve, and gives what they say to whoever wants it."""

    def __init__(self, members: Roll, take: Callable[[WorkerPage], Awaitable[None]]) -> None:
        """
        Args:
            take: gets each page, in any order and several at a time.
        """
        self._members = members
        self._take = take
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._room = MOST_BYTES

    async def ask(self) -> None:
        """Ask once. Pages that are missing are counted, with the reason.

        Raises what taking a page raises, in a group.
        """
        async with asyncio.TaskGroup() as group:
            for member in self._members.available():
                group.create_task(self._ask(member), name="worker figures")

    async def _ask(self, member: Member) -> None:
        async with self._turns:
            page = await _page(member)
            if page is None:
                return
            self._room -= len(page.text)
            if self._room < 0:
                WORKER_PAGES_MISSING.labels("no_room").inc()
                return
            await self._take(page)


async def _page(member: Member) -> WorkerPage | None:
    """One worker's page; None if it is missing, which is counted."""
    try:
        async with asyncio.timeout(ANSWER_S):
            if member.link is None:
                reason = "lost"
            elif text := await member.link.figures():
                return WorkerPage(member.card.worker_id, text)
            else:
                reason = "too_large"
    except TimeoutError:
        reason = "silent"
    except (WorkerBusyError, WorkerLostError):
        reason = "lost"
    WORKER_PAGES_MISSING.labels(reason).inc()
    return None
