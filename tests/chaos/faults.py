"""What goes wrong, how often, and how it is put right again."""

import asyncio
import os
import random
import resource
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.chaos import hostile, oddities
from tests.chaos.fleet import Fleet, Worker, pick
from tests.open_files import open_files

SHARED_MEMORY = Path("/dev/shm")

WORKER_LANES = 2
"""Faults of workers at once. There are three, so one is left alone at any time."""


HOSTILE = 40
"""Hostile clients at once."""

HANG_S = 100.0
"""The longest time for which a process hangs that nobody ends."""


class Share(NamedTuple):
    """How much of one kind.

    Attributes:
        times: among a hundred faults.
        pause_s: mean pause before the next of its lane, in seconds, so that all lanes take
            about as long.
    """

    times: int
    pause_s: float


GROUP_KILLED = "worker and engine killed at once"

WORKER_SHARES = {
    "worker killed": Share(5, 2),
    "engine killed": Share(2, 2),
    GROUP_KILLED: Share(2, 2),
    "worker restarted in place": Share(3, 2),
    "worker stopped": Share(14, 2),
    "engine stopped": Share(5, 2),
}
OTHER_SHARES = {
    "frontend killed": Share(11, 40),
    "events dropped": Share(12, 55),
    "shared memory full": Share(8, 80),
    "odd discovery entries": Share(8, 70),
    "discovery directory lost": Share(6, 90),
    "clock jumped": Share(6, 100),
    "hostile bodies": Share(8, 70),
    "media process hung": Share(5, 80),
    "no more file handles": Share(5, 120),
}
SHARES = WORKER_SHARES | OTHER_SHARES


class Faults:
    """Inflicts them in random order: some of workers at once, beside one of each other kind.

    Attributes:
        complaints: what went wrong otherwise than for a user.
    """

    def __init__(self, fleet: Fleet, random_: random.Random) -> None:
        self.inflicted: Counter[str] = Counter()
        self.complaints: Counter[str] = Counter()
        self._fleet = fleet
        self._cards_away = fleet.cards.with_name("cards-away")
        self._random = random_
        self._inflict: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed": self._kill_worker,
            "engine killed": self._kill_engine,
            GROUP_KILLED: self._kill_group,
            "worker restarted in place": self._restart_worker,
            "worker stopped": self._stop_worker,
            "engine stopped": self._stop_engine,
            "frontend killed": self._kill_frontend,
            "events dropped": self._drop_events,
            "shared memory full": self._fill_memory,
            "odd discovery entries": self._lay_oddities,
            "discovery directory lost": self._lose_directory,
            "clock jumped": self._jump,
            "hostile bodies": self._send_hostile_bodies,
            "media process hung": self._hang_media_process,
            "no more file handles": self._exhaust_handles,
        }

    async def run(self, count: int, kinds: Collection[str] = tuple(SHARES)) -> None:
        """Inflict so many of some kinds, at least one of each, and put all of them right."""
        among = sum(SHARES[kind].times for kind in kinds)

        def times(kind: str) -> list[str]:
            return [kind] * max(1, round(SHARES[kind].times * count / among))

        of_workers = deque(chain.from_iterable(times(k) for k in WORKER_SHARES if k in kinds))
        self._random.shuffle(of_workers)
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKER_LANES):
                group.create_task(self._lane(of_workers))
            for kind in OTHER_SHARES:
                if kind in kinds:
                    group.create_task(self._lane(deque(times(kind))))

    async def _lane(self, kinds: deque[str]) -> None:
        while kinds:
            kind = kinds.popleft()
            await self._inflict[kind]()
            self.inflicted[kind] += 1
            if kinds:
                await asyncio.sleep(self._random.uniform(0, 2 * SHARES[kind].pause_s))

    # Workers. Whoever keeps them starts them again.

    @asynccontextmanager
    async def _restarted(self) -> AsyncIterator[Worker]:
        """A worker that is to end, and to be back afterwards."""
        worker = pick(self._fleet.workers[1:], self._random)
        async with worker.busy:
            await self._fleet.has(worker)
            former = worker.incarnation
            yield worker
            await self._fleet.has(worker, former)

    async def _kill_worker(self) -> None:
        async with self._restarted() as worker:
            _signal(lambda: worker.pid, signal.SIGKILL)

    async def _kill_engine(self) -> None:
        async with self._restarted() as worker:
            _signal(lambda: worker.engine_pid, signal.SIGKILL)

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
            _signal(lambda: pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._random.uniform(1, longest_s))
            finally:
                _signal(lambda: pid, signal.SIGCONT)
            await self._fleet.has(worker)

    # Others

    async def _kill_frontend(self) -> None:
        async with self._fleet.doomed.busy:
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
                    # It takes seconds, for which no client may stand still: frontends close
                    # connections on which nothing comes.
                    await asyncio.to_thread(_fill, file.fileno(), step)
                await asyncio.sleep(self._random.uniform(1, 6))
            finally:
                path.unlink()

    # Discovery

    async def _lay_oddities(self) -> None:
        """What is no card, for some of the directory's readings."""
        stem = f"odd-{self.inflicted['odd discovery entries']}"
        for number in range(3):
            with suppress(FileNotFoundError):  # the directory itself may be lost
                oddities.lay(self._fleet.cards, f"{stem}-{number}", self._random)
        try:
            await asyncio.sleep(self._random.uniform(1, 10))
        finally:
            for directory in (self._fleet.cards, self._cards_away):  # it may be moved just now
                oddities.clear(directory, stem)
        await self._all_there()

    async def _lose_directory(self) -> None:
        """Moved away for a while, emptied, or both at once. Who lost his card writes it again."""
        away = self._cards_away
        if self._random.random() < 0.5:
            for path in self._fleet.cards.glob("*.json"):
                with suppress(OSError):
                    path.unlink()
        else:
            self._fleet.cards.rename(away)
            try:
                await asyncio.sleep(self._random.uniform(1, 20))
            finally:
                while away.exists():  # a worker that starts meanwhile makes it anew
                    shutil.rmtree(self._fleet.cards, ignore_errors=True)
                    with suppress(OSError):
                        away.rename(self._fleet.cards)
        await self._all_there()

    async def _jump(self) -> None:
        """The clock on the wall, of a frontend or of whoever keeps the files."""
        if self._random.random() < 0.5:
            frontend = self._random.choice(self._fleet.frontends)
            async with frontend.busy:
                os.kill(frontend.process.pid, signal.SIGRTMIN)
                await asyncio.sleep(self._random.uniform(5, 30))
                os.kill(frontend.process.pid, signal.SIGRTMIN + 1)
        else:
            until = time.monotonic() + self._random.uniform(5, 30)
            while time.monotonic() < until:
                jump_s = self._random.choice((-1, 1)) * 86_400 ** self._random.random()
                for path in self._fleet.cards.glob("*.json"):
                    with suppress(OSError):
                        os.utime(path, 2 * (time.time() + jump_s,), follow_symlinks=False)
                await asyncio.sleep(self._random.uniform(0.1, 3))
        await self._all_there()

    async def _all_there(self) -> None:
        for worker in self._fleet.workers:
            await self._fleet.has(worker)

    # Frontends

    async def _send_hostile_bodies(self) -> None:
        """Many at once, each for some seconds."""
        frontend = self._random.choice(self._fleet.frontends)
        kinds = [self._random.choice(hostile.KINDS) for _ in range(HOSTILE)]
        stays = [self._random.uniform(1, 20) for _ in kinds]
        statuses = await asyncio.gather(
            *(
                hostile.visit(frontend.port, kind, stay_s, self._random)
                for kind, stay_s in zip(kinds, stays, strict=True)
            )
        )
        for kind, status in zip(kinds, statuses, strict=True):
            if hostile.is_wrong(kind, status):
                self.complaints[f"hostile{kind.__name__} at {frontend.name}: {status}"] += 1

    async def _hang_media_process(self) -> None:
        """It stands still until somebody ends it, or for a long while."""
        frontend = self._fleet.survivor
        async with frontend.busy:
            pids = frontend.media_pids
            if not pids:
                return  # they are being replaced
            pid = self._random.choice(pids)
            _signal(lambda: pid, signal.SIGSTOP)
            until = time.monotonic() + self._random.uniform(5, HANG_S)
            while time.monotonic() < until and psutil.pid_exists(pid):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            _signal(lambda: pid, signal.SIGCONT)
            await self._fleet.serves(frontend)

    async def _exhaust_handles(self) -> None:
        """It can open nothing more for some seconds: no connection, no file, no pipe."""
        frontend = self._random.choice(self._fleet.frontends)
        async with frontend.busy:
            pid = frontend.process.pid
            usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            frontend.short = True
            try:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(open_files(pid)), usual[1]))
                await asyncio.sleep(self._random.uniform(1, 8))
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
                frontend.shortages += 1
                frontend.short = False
            frontend.process.check_alive()
            await self._fleet.serves(frontend)


def _signal(pid_of: Callable[[], int], number: signal.Signals) -> None:
    """Unless it died of another fault."""
    with suppress(ProcessLookupError, FileNotFoundError, psutil.Error):
        os.kill(pid_of(), number)


def _fill(descriptor: int, step: int) -> None:
    """Allocate until there is no more room for a step."""
    size = os.fstat(descriptor).st_size
    while True:
        try:
            os.posix_fallocate(descriptor, size, step)
        except OSError:
            return
        size += step
