"""What goes wrong, how often, and how it is put right again."""

import asyncio
import os
import random
import signal
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tests.chaos.fleet import Fleet, Worker, pick

SHARED_MEMORY = Path("/dev/shm")

WORKER_LANES = 2
"""Faults of workers at once. There are three, so one is left alone at any time."""


class Share(NamedTuple):
    """How much of one kind.

    Attributes:
        times: among a hundred faults.
        pause_s: mean pause before the next of its lane, in seconds, so that all lanes take
            about as long.
    """

    times: int
    pause_s: float


WORKER_SHARES = {
    "worker killed": Share(6, 2),
    "engine killed": Share(3, 2),
    "worker and engine killed at once": Share(3, 2),
    "worker restarted in place": Share(4, 2),
    "worker stopped": Share(20, 2),
    "engine stopped": Share(6, 2),
}
OTHER_SHARES = {
    "frontend killed": Share(12, 25),
    "events dropped": Share(30, 22),
    "shared memory full": Share(16, 35),
}
SHARES = WORKER_SHARES | OTHER_SHARES


class Faults:
    """Inflicts them in random order: some of workers at once, beside one of each other kind."""

    def __init__(self, fleet: Fleet, random_: random.Random) -> None:
        self.inflicted: Counter[str] = Counter()
        self._fleet = fleet
        self._random = random_
        self._inflict: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed": self._kill_worker,
            "engine killed": self._kill_engine,
            "worker and engine killed at once": self._kill_group,
            "worker restarted in place": self._restart_worker,
            "worker stopped": self._stop_worker,
            "engine stopped": self._stop_engine,
            "frontend killed": self._kill_frontend,
            "events dropped": self._drop_events,
            "shared memory full": self._fill_memory,
        }

    async def run(self, count: int) -> None:
        """Inflict so many and put all of them right."""

        def times(kind: str) -> list[str]:
            return [kind] * max(1, round(SHARES[kind].times * count / 100))

        of_workers = deque(chain.from_iterable(map(times, WORKER_SHARES)))
        self._random.shuffle(of_workers)
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKER_LANES):
                group.create_task(self._lane(of_workers))
            for kind in OTHER_SHARES:
                group.create_task(self._lane(deque(times(kind))))

    async def _lane(self, kinds: deque[str]) -> None:
        while kinds:
            kind = kinds.popleft()
            await self._inflict[kind]()
            self.inflicted[kind] += 1
            await asyncio.sleep(self._random.uniform(0, 2 * SHARES[kind].pause_s))

    # Workers. Whoever keeps them starts them again.

    @asynccontextmanager
    async def _restarted(self) -> AsyncIterator[Worker]:
        """A worker that is to end, and to be back afterwards."""
        worker = pick(self._fleet.workers[1:], self._random)
        async with worker.busy:
            await self._fleet.has(worker)
            former = worker.card().incarnation
            yield worker
            await self._fleet.has(worker, former)

    async def _kill_worker(self) -> None:
        async with self._restarted() as worker:
            os.kill(worker.pid, signal.SIGKILL)

    async def _kill_engine(self) -> None:
        async with self._restarted() as worker:
            os.kill(worker.engine_pid, signal.SIGKILL)

    async def _kill_group(self) -> None:
        async with self._restarted() as worker:
            os.killpg(worker.process.pid, signal.SIGKILL)

    async def _restart_worker(self) -> None:
        async with self._restarted() as worker:
            worker.process.signal(signal.SIGTERM)

    async def _stop_worker(self) -> None:
        await self._stop(lambda worker: worker.pid, longest_s=25)

    async def _stop_engine(self) -> None:
        await self._stop(lambda worker: worker.engine_pid, longest_s=60)

    async def _stop(self, pid_of: Callable[[Worker], int], longest_s: float) -> None:
        worker = pick(self._fleet.workers, self._random)
        async with worker.busy:
            await self._fleet.has(worker)
            pid = pid_of(worker)
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._random.uniform(1, longest_s))
            finally:
                with suppress(ProcessLookupError):  # it died of another fault
                    os.kill(pid, signal.SIGCONT)
            await self._fleet.has(worker)

    # Others

    async def _kill_frontend(self) -> None:
        await self._fleet.doomed.kill()
        await asyncio.sleep(self._random.uniform(0, 3))
        await self._fleet.doomed.start_again()

    async def _drop_events(self) -> None:
        serving = [frontend for frontend in self._fleet.frontends if not frontend.down]
        self._random.choice(serving).process.signal(signal.SIGUSR1)

    async def _fill_memory(self) -> None:
        """As far as it goes; what is there is somebody's."""
        path = SHARED_MEMORY / "filled"
        with path.open("wb") as file:
            try:
                for step in (1 << 20, 1 << 12):
                    _fill(file.fileno(), step)
                await asyncio.sleep(self._random.uniform(1, 6))
            finally:
                path.unlink()


def _fill(descriptor: int, step: int) -> None:
    """Allocate until there is no more room for a step."""
    size = os.fstat(descriptor).st_size
    while True:
        try:
            os.posix_fallocate(descriptor, size, step)
        except OSError:
            return
        size += step
