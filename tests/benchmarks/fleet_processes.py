"""The processes of ``bench_fleet``: simulated workers, and real frontends over them."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.processes import START_TIMEOUT_S, HttpServer, Process, start_frontend
from tests.simgpu.gpu import GpuModel
from tests.simgpu.start import start_sim_worker
from tests.simgpu.stats import WRITE_EVERY_S, Stats
from tests.simgpu.totals import read_totals

WORKER_FLAGS = ("--mm-processor-cache-gb=0.25",)
FRONTEND_FLAGS = ("--mm-arena-gb=0.12", "--disable-uvicorn-access-log")


class _Rank(msgspec.Struct):
    index: str


class _View(msgspec.Struct):
    """What is read of a frontend's view of a worker."""

    connected: bool
    ranks: list[_Rank]


_VIEWS = msgspec.json.Decoder(list[_View])


@dataclass
class Fleet:
    """All processes.

    Args:
        stack: ends them.
        directory: of the model, the cards, totals and logs.
        gpu: of the workers.
    """

    stack: ExitStack
    directory: Path
    gpu: GpuModel
    workers: list[Process] = field(default_factory=list)
    frontends: list[HttpServer] = field(default_factory=list)

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def urls(self) -> list[str]:
        return [frontend.url for frontend in self.frontends]

    def start(self, workers: int, frontends: int) -> None:
        """Start all at once."""
        script = Path(__file__).parents[2] / "examples" / "demo_model.py"
        subprocess.run([sys.executable, script, self.model], check=True, capture_output=True)
        for number in range(workers):
            worker = start_sim_worker(
                f"s{number}",
                self.model,
                self.directory / "cards",
                self.directory,
                *WORKER_FLAGS,
                stats=self.totals_folder,
                gpu=self.gpu,
            )
            self.stack.callback(worker.stop)
            self.workers.append(worker)
        self.frontends = [self.start_frontend(f"f{number}") for number in range(frontends)]

    def start_frontend(
        self,
        name: str,
        port: int | None = None,
        flags: Sequence[str] = FRONTEND_FLAGS,
        env: Mapping[str, str] = {},
    ) -> HttpServer:
        """One more frontend."""
        cards = self.directory / "cards"
        frontend = start_frontend(name, cards, self.directory, *flags, port=port, env=env)
        self.stack.callback(frontend.stop)
        return frontend

    async def exact(self, http: aiohttp.ClientSession, frontend: HttpServer) -> float:
        """Wait until a frontend routes to all workers by what is in their caches.

        Returns:
            Seconds that took.
        """
        began = time.monotonic()
        while time.monotonic() - began < 2 * START_TIMEOUT_S:
            for process in (frontend, *self.workers):
                process.check_alive()
            with contextlib.suppress(aiohttp.ClientError, msgspec.DecodeError):
                async with http.get(f"{frontend.url}/mmrouter/workers") as reply:
                    views = _VIEWS.decode(await reply.read())
                known = [rank.index for view in views if view.connected for rank in view.ranks]
                if known == ["exact"] * len(self.workers) and frontend.is_ready():
                    return time.monotonic() - began
            await asyncio.sleep(0.2)
        raise TimeoutError(f"{frontend.name} does not know all workers:\n{frontend.tail()}")

    async def totals(self, requests: int | None = None) -> Stats:
        """What all engines have done, once they are said to have had so many requests."""
        while True:
            await asyncio.sleep(2 * WRITE_EVERY_S)  # after which an engine at rest has told all
            totals = read_totals(self.totals_folder)
            if requests is None or totals.requests >= requests:
                return totals

    @property
    def totals_folder(self) -> Path:
        return self.directory / "totals"

    def memory_gb(self) -> float:
        """Of all processes, what they share counted once."""
        roots = [psutil.Process(each.pid) for each in (*self.workers, *self.frontends)]
        each = [one for root in roots for one in (root, *root.children(recursive=True))]
        return float(sum(one.memory_full_info().pss for one in each)) / 2**30


@dataclass(frozen=True)
class Cached:
    """Cached tokens of a frontend's requests, since its start."""

    predicted: float
    realised: float


async def cached(http: aiohttp.ClientSession, url: str) -> Cached:
    """What a frontend expected of caches, and what came of it."""
    async with http.get(f"{url}/metrics") as reply:
        families = text_string_to_metric_families(await reply.text())
    sums = {f"mmrouter_{kind}_cached_tokens_total": 0.0 for kind in ("predicted", "realised")}
    for family in families:
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    return Cached(*sums.values())
