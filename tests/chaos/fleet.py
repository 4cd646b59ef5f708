"""The processes that are disturbed: three workers and two frontends, each started again in
its place when it ends.

Worker ``w0`` and frontend ``a`` live through everything, so that what leaks shows in them. (Should
full shared memory kill the engine of ``w0``, its successor is compared.)
"""

import asyncio
import contextlib
import os
import random
import signal
import stat
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from common.errors import MmRouterError
from common.identity import Incarnation
from common.request_plane.card import WorkerCard
from tests.chaos.report import Report, ReportFile
from tests.e2e.processes import (
    HttpServer,
    Process,
    start_frontend,
    start_worker,
)
from tests.ports import free_port

START_S = 900.0
STALL_S = 40.0
WORKER_WAIT_S = 300.0
"""How long a request waits for a worker. Engines start slowly while everything else goes on."""

WORKERS_CACHE = "--mm-processor-cache-gb=0.01"
FRONTENDS_CACHE = "--media-cache-mb=8"
"""New pictures are sent all the time: caches of the usual size, up to 4 GiB, would grow until the
end as leaks do. These are full after some twenty pictures."""

MEDIA_PROCESSES = 2
"""Of the frontend that lives through everything; the other one processes media itself."""

WATCHED_WORKER = "tests.chaos.watched_worker"

LARGEST_CARD = 1 << 20
"""Bytes. What is larger in the discovery directory is one of the faults."""

Metrics = dict[str, float]

Moved = dict[tuple[str, str], float]
"""Bytes of media by worker and transport."""


class Worker:
    """One of the workers.

    Attributes:
        busy: held while a fault happens to it.
        incarnation: when it was last seen to be there.
    """

    def __init__(self, name: str, fleet: "Fleet") -> None:
        self.name = name
        self.busy = asyncio.Lock()
        self.incarnation: Incarnation | None = None
        self.starts = 0
        self._fleet = fleet
        self.process = self._start()

    def _start(self) -> Process:
        self.starts += 1
        logs = self._fleet.directory / f"{self.name}-{self.starts}"
        logs.mkdir()
        self._report = logs / "report.json"
        return start_worker(
            self.name,
            self._fleet.model,
            self._fleet.cards,
            logs,
            WORKERS_CACHE,
            module=(WATCHED_WORKER, str(self._report)),
        )

    def card(self) -> WorkerCard:
        """What it says of itself, among all else that lies there.

        Raises:
            FileNotFoundError: nothing of this process.
        """
        pid = self.pid
        for path in self._fleet.cards.iterdir():
            with contextlib.suppress(OSError, ValueError, MmRouterError):
                about = path.lstat()
                if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST_CARD:
                    continue
                card = WorkerCard.from_json(path.read_bytes())
                if card.worker_id == self.name and card.host.pid == pid:
                    return card
        raise FileNotFoundError(f"no card of worker {self.name}")

    @property
    def pid(self) -> int:
        """Of the process that frontends talk to, a child of the one that was started."""
        return _only(
            child
            for child in psutil.Process(self.process.pid).children()
            if WATCHED_WORKER in child.cmdline()
        )

    @property
    def engine_pid(self) -> int:
        """Of the process that computes."""
        return _only(
            child
            for child in psutil.Process(self.pid).children(recursive=True)
            if "EngineCore" in " ".join(child.cmdline())
        )

    async def report(self) -> Report:
        """What it says of itself."""
        return await _report(self.process, self.pid, ReportFile(self._report))

    async def keep(self) -> None:
        """Start it again in its place whenever it ends, as whoever runs services does."""
        while True:
            await ended(self.process)
            self.process.stop()
            self.process = self._start()


class Frontend:
    """One of the frontends.

    Attributes:
        port: where it serves.
        transport: how media travel from it when all is well.
        busy: held while a fault happens to this process.
        deaths: how often it was killed: a request that saw it die is sent again.
        down: whether it is being started again.
        short: whether it can open nothing more.
        shortages: how often that was: a request that it did not take is sent again.
        counted, losses: what its killed predecessors had counted, and events they lost.
    """

    def __init__(
        self, name: str, fleet: "Fleet", transport: str, *flags: str, **extra_env: str
    ) -> None:
        self.name = name
        self.transport = transport
        self.busy = asyncio.Lock()
        self.deaths = 0
        self.down = False
        self.short = False
        self.shortages = 0
        self.counted: Metrics = {}
        self.losses = 0
        self.starts = 0
        self._fleet = fleet
        self._flags = flags
        self._extra_env = extra_env
        self.port = free_port()
        self.process = self._start()

    def _start(self) -> HttpServer:
        self.starts += 1
        logs = self._fleet.directory / f"{self.name}-{self.starts}"
        logs.mkdir()
        self._report = logs / "report.json"
        return start_frontend(
            self.name,
            self._fleet.cards,
            logs,
            "--mm-arena-gb=0.06",
            FRONTENDS_CACHE,
            f"--router-stall={STALL_S}",
            f"--worker-wait={WORKER_WAIT_S}",
            *self._flags,
            module=("tests.chaos.watched_frontend", str(self._report)),
            port=self.port,
            env=self._extra_env,
        )

    @property
    def url(self) -> str:
        return self.process.url

    async def metrics(self) -> Metrics:
        """What it has counted, by name, summed over labels."""
        found: Metrics = dict(self.counted)
        for sample in await self._samples():
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    async def moved(self) -> Moved:
        """How media travelled from this process."""
        return {
            (sample.labels["worker_id"], sample.labels["transport"]): sample.value
            for sample in await self._samples()
            if sample.name == "mmrouter_tensor_bytes_sent_total"
        }

    @property
    def media_pids(self) -> list[int]:
        """Of the processes that process media for it."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        server = "common.aio.fork_server"
        servers = {each.pid for each in children if server in each.cmdline()}
        return [each.pid for each in children if each.ppid() in servers]

    async def _samples(self) -> list[Sample]:
        async with self._fleet.http.get(f"{self.url}/metrics") as reply:
            families = text_string_to_metric_families(await reply.text())
            return [sample for family in families for sample in family.samples]

    async def report(self) -> Report:
        """What it says of itself."""
        return await _report(self.process, self.process.pid, ReportFile(self._report))

    async def kill(self) -> None:
        """SIGKILL; what it has counted so far is remembered."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            counted = await self.metrics()
            lost = (await self.report()).lost
            self.counted = {name: n for name, n in counted.items() if name.endswith("_total")}
            self.losses += lost
        self.deaths += 1
        self.down = True
        self.process.signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)

    async def start_again(self) -> None:
        """On the same port, as often as it takes, until it serves."""
        while True:
            self.process = self._start()
            serving = asyncio.create_task(self._fleet.serves(self))
            ending = asyncio.create_task(ended(self.process))
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if serving.done():
                await serving
                self.down = False
                return
            serving.cancel()
            self.process.stop()


async def _report(process: Process, pid: int, file: ReportFile) -> Report:
    """Ask a watched process, which is one that was started or its child, for its report."""
    file.forget()
    os.kill(pid, signal.SIGUSR2)
    while (report := file.read()) is None:
        process.check_alive()
        await asyncio.sleep(0.05)
    return report


async def ended(process: Process) -> None:
    """Wait until a process has ended."""
    while True:
        if not process.is_alive():
            return
        await asyncio.sleep(0.2)


class Fleet:
    """All of them."""

    def __init__(self, model: Path, directory: Path, http: aiohttp.ClientSession) -> None:
        self.model = model
        self.directory = directory
        self.cards = directory / "cards"
        self.http = http
        self.workers = [Worker(name, self) for name in ("w0", "w1", "w2")]
        self.survivor = Frontend("a", self, "shm", f"--preprocess-workers={MEDIA_PROCESSES}")
        self.doomed = Frontend("b", self, "nixl", DYNAMO_MM_TRANSFER="nixl")

    @property
    def frontends(self) -> tuple[Frontend, Frontend]:
        return self.survivor, self.doomed

    async def ready(self) -> None:
        """Wait for everybody. Nobody starts a frontend again that ends by itself."""
        for frontend in self.frontends:
            await self._until(partial(self._lives, frontend), frontend.process)
        for worker in self.workers:
            await self.has(worker)

    async def serves(self, frontend: Frontend) -> None:
        """Wait until a frontend serves."""
        await self._until(lambda: self._healthy(frontend), frontend.process)

    async def has(self, worker: Worker, former: Incarnation | None = None) -> None:
        """Wait until the surviving frontend routes to a worker by what is in its cache, and not
        as the former one, whose card may still lie there."""
        await self._until(lambda: self._exact(worker, former), worker.process)

    async def views(self, frontend: Frontend) -> list[dict[str, Any]]:
        """What a frontend knows of the workers."""
        async with self.http.get(f"{frontend.url}/mmrouter/workers") as reply:
            return list(await reply.json())

    async def works(self) -> bool:
        """Whether an engine has a request, as the surviving frontend was told last."""
        return any(view["running"] for view in await self.views(self.survivor))

    async def _until(self, there: Callable[[], Awaitable[bool]], process: Process) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(
                aiohttp.ClientError, TimeoutError, OSError, ValueError, psutil.Error
            ):
                if await there():
                    return
            await asyncio.sleep(0.5)
        raise TimeoutError(f"{process.name} is not back:\n{process.tail()}")

    async def _healthy(self, frontend: Frontend) -> bool:
        async with self.http.get(f"{frontend.url}/health") as reply:
            return reply.status == 200

    async def _lives(self, frontend: Frontend) -> bool:
        frontend.process.check_alive()
        return await self._healthy(frontend)

    async def _exact(self, worker: Worker, former: Incarnation | None) -> bool:
        incarnation = worker.card().incarnation
        if incarnation == former:
            return False
        for view in await self.views(self.survivor):
            if view["worker_id"] == worker.name and view["incarnation"] == incarnation:
                worker.incarnation = incarnation
                return view["connected"] and {rank["index"] for rank in view["ranks"]} == {"exact"}
        return False

    @property
    def _everybody(self) -> list[Process]:
        processes: list[Process] = [frontend.process for frontend in self.frontends]
        return processes + [worker.process for worker in self.workers]

    def leave(self) -> list[int]:
        """Ask everybody to leave; their exit statuses."""
        for process in self._everybody:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGTERM)
        return [process.wait(120) for process in self._everybody]

    def end(self) -> None:
        """End whatever is left of everybody."""
        for process in self._everybody:
            process.stop()


def _only(processes: Iterable[psutil.Process]) -> int:
    """The pid of one process that must be there alone.

    Raises:
        FileNotFoundError: it isn't there, as while its worker starts.
    """
    pids = [process.pid for process in processes]
    if len(pids) != 1:
        raise FileNotFoundError(f"{len(pids)} processes instead of one")
    return pids[0]


def pick(workers: list[Worker], random_: random.Random) -> Worker:
    """One to which nothing happens now, if there is one."""
    free = [worker for worker in workers if not worker.busy.locked()]
    return random_.choice(free or workers)
