"""Starts the processes of contenders. All of a race are up at the same time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import aiohttp

from tests.benchmarks.fleet_processes import WORKER_FLAGS, Fleet
from tests.benchmarks.serving.contenders import Contender, Family, Role
from tests.benchmarks.serving.engines import Engines
from tests.benchmarks.serving.running import Running
from tests.e2e.processes import HttpServer, start_plain_vllm, start_worker

CACHE_FLAG: Final = "--mm-processor-cache-gb=0.25"
"""Of each vLLM process: its default would take gigabytes from the machine."""

QUIET_FLAG: Final = "--disable-uvicorn-access-log"

Ready: TypeAlias = Callable[[], Awaitable[list[Running]]]
"""Waits until contenders that were started serve."""


@dataclass(frozen=True)
class Ground:
    """Where contenders are started.

    Attributes:
        fleet: of our workers; its directory has the model, and all logs.
    """

    fleet: Fleet
    http: aiohttp.ClientSession
    engines: Engines

    def totals(self, name: str) -> Path | None:
        """The folder of engines' totals; None of real engines."""
        return self._folder(name) if self.engines.gpu else None

    def engine_env(self, name: str, number: int) -> dict[str, str]:
        """Of the process of an engine, or of all that a process has."""
        return self.engines.env(number, self._folder(name))

    def _folder(self, name: str) -> Path:
        return self.fleet.directory / f"totals-{name}"

    def directory(self, name: str) -> Path:
        """A new one, for the logs of one process."""
        made = self.fleet.directory / name
        made.mkdir()
        return made

    def vllm(self, family: Family, name: str, *flags: str, number: int = 0) -> HttpServer:
        """vLLM's own server.

        Args:
            number: which it is, where each engine has one.
        """
        server = start_plain_vllm(
            self.fleet.model, self.directory(name), *self.engines.flags, CACHE_FLAG, QUIET_FLAG,
            *flags, name=name, env=self.engine_env(family.name, number),
        )  # fmt: skip
        self.fleet.stack.callback(server.stop)
        return server


def start_ours(ground: Ground, contenders: Sequence[Contender]) -> Ready:
    """Frontends over the same workers: one has work at a time."""
    fleet = ground.fleet
    for number in range(ground.engines.count):
        worker = start_worker(
            f"s{number}", fleet.model, fleet.directory / "cards", fleet.directory,
            *ground.engines.flags, *WORKER_FLAGS, env=ground.engine_env(Family.OURS.name, number),
        )  # fmt: skip
        fleet.stack.callback(worker.stop)
        fleet.workers.append(worker)
    frontends = [
        fleet.start_frontend(
            each.name, flags=("--mm-arena-gb=1", QUIET_FLAG, *each.flags), env=each.env
        )
        for each in contenders
    ]

    async def ready() -> list[Running]:
        for frontend in frontends:
            await fleet.exact(ground.http, frontend)
        return [
            Running.of(
                each,
                frontend,
                {Role.FRONTEND: [frontend], Role.WORKER: fleet.workers},
                ground.totals(Family.OURS.name),
            )
            for each, frontend in zip(contenders, frontends, strict=True)
        ]

    return ready


def start_data_parallel(ground: Ground, contenders: Sequence[Contender]) -> Ready:
    """One server of vLLM's with all engines."""
    (contender,) = contenders
    family = Family.DATA_PARALLEL
    server = ground.vllm(
        family, contender.name, f"--data-parallel-size={ground.engines.count}", *contender.flags
    )

    async def ready() -> list[Running]:
        await asyncio.to_thread(server.wait_for_status, 200)
        return [
            Running.of(contender, server, {Role.API_SERVER: [server]}, ground.totals(family.name))
        ]

    return ready
