"""The processes that are disturbed: three workers and two frontends, each started again in
its place when it ends.

Worker ``w0`` and frontend ``a`` live through everything, so that what leaks shows in them. (Should
full shared memory kill the engine of ``w0``, its successor is compared.)
"""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from common.card import WorkerCard
from common.identity import Incarnation
from tests.chaos.report import Report
from tests.e2e.processes import (
    HttpServer,
    Process,
    engine_pid,
    start_frontend,
    start_worker,
    worker_pid,
)
from tests.ports import free_port

START_S = 900.0
STALL_S = 40.0
WORKER_WAIT_S = 300.0
"""How long a request waits for a worker. Engines start slowly while everything else goes on."""

Metrics = dict[str, float]


class Worker:
    """One of the workers.

    Attributes:
        busy: held while a fault happens to it.
    """

    def __init__(self, name: str, fleet: "Fleet") -> None:
        self.name = name
        self.busy = asyncio.Lock()
        self.starts = 0
        self._fleet = fleet
        self.process = self._start()

    def _start(self) -> Process:
        self.starts += 1
        logs = self._fleet.directory / f"{self.name}-{self.starts}"
        logs.mkdir()
        return start_worker(self.name, self._fleet.model, self._fleet.cards, logs)

    def card(self) -> WorkerCard:
        """What it says of itself."""
        path = self._fleet.cards / f"{self.name}.json"
        return WorkerCard.from_json(path.read_bytes())

    @property
    def pid(self) -> int:
        """Of the process that frontends talk to."""
        return worker_pid(self._fleet.cards, self.name)

    @property
    def engine_pid(self) -> int:
        """Of the process that computes."""
        return engine_pid(self._fleet.cards, self.name)

    async def keep(self) -> None:
        """Start it again in its place whenever it ends, as whoever runs services does."""
        while True:
            await ended(self.process)
            self.process.stop()
            self.process = self._start()


class Frontend:
    """One of the frontends.

    Attributes:
        deaths: how often it was killed: a request that saw it die is sent again.
        down: whether it is being started again.
        counted, losses: what its killed predecessors had counted, and events they lost.
    """

    def __init__(self, name: str, fleet: "Fleet", *flags: str, **extra_env: str) -> None:
        self.name = name
        self.deaths = 0
        self.down = False
        self.counted: Metrics = {}
        self.losses = 0
        self.starts = 0
        self._fleet = fleet
        self._flags = flags
        self._extra_env = extra_env
        self._port = free_port()
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
            f"--router-stall={STALL_S}",
            f"--worker-wait={WORKER_WAIT_S}",
            *self._flags,
            module=("tests.chaos.watched_frontend", str(self._report)),
            port=self._port,
            env=self._extra_env,
        )

    @property
    def url(self) -> str:
        return self.process.url

    async def metrics(self) -> Metrics:
        """What it has counted, by name, summed over labels."""
        found: Metrics = dict(self.counted)
        async with self._fleet.http.get(f"{self.url}/metrics") as reply:
            for family in text_string_to_metric_families(await reply.text()):
                for sample in family.samples:
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    async def report(self) -> Report:
        """What it says of itself."""
        self._report.unlink(missing_ok=True)
        self.process.signal(signal.SIGUSR2)
        while not self._report.exists():
            self.process.check_alive()
            await asyncio.sleep(0.05)
        return msgspec.json.decode(self._report.read_bytes(), type=Report)

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
        self.survivor = Frontend("a", self)
        self.doomed = Frontend("b", self, DYNAMO_MM_TRANSFER="nixl")

    @property
    def frontends(self) -> tuple[Frontend, Frontend]:
        return self.survivor, self.doomed

    async def ready(self) -> None:
        """Wait for everybody."""
        for frontend in self.frontends:
            await self.serves(frontend)
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

    async def _until(self, there: Callable[[], Awaitable[bool]], process: Process) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
                if await there():
                    return
            await asyncio.sleep(0.5)
        raise TimeoutError(f"{process.name} is not back:\n{process.tail()}")

    async def _healthy(self, frontend: Frontend) -> bool:
        async with self.http.get(f"{frontend.url}/health") as reply:
            return reply.status == 200

    async def _exact(self, worker: Worker, former: Incarnation | None) -> bool:
        incarnation = worker.card().incarnation
        if incarnation == former:
            return False
        for view in await self.views(self.survivor):
            if view["worker_id"] == worker.name and view["incarnation"] == incarnation:
                return view["connected"] and {rank["index"] for rank in view["ranks"]} == {"exact"}
        return False

    def stop(self) -> list[int]:
        """Ask everybody to leave; their exit statuses."""
        everybody: list[Process] = [frontend.process for frontend in self.frontends]
        everybody += [worker.process for worker in self.workers]
        for process in everybody:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGTERM)
        statuses = [process.wait(120) for process in everybody]
        for process in everybody:
            process.stop()
        return statuses


def pick(workers: list[Worker], random_: random.Random) -> Worker:
    """One to which nothing happens now, if there is one."""
    free = [worker for worker in workers if not worker.busy.locked()]
    return random_.choice(free or workers)
