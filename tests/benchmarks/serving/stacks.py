"""Starts the processes of contenders. All of a race are up at the same time."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.benchmarks.fleet_processes import Fleet
from tests.benchmarks.serving.contenders import Contender, Family, Role
from tests.benchmarks.serving.usage import Usage
from tests.e2e.processes import HttpServer, Process
from tests.ports import free_port
from tests.simgpu.start import start_sim_vllm
from tests.simgpu.stats import WRITE_EVERY_S, Stats
from tests.simgpu.totals import read_totals

CACHE_FLAG = "--mm-processor-cache-gb=0.25"
"""Of each vLLM process: its default would take gigabytes from the machine."""

QUIET_FLAG = "--disable-uvicorn-access-log"

TOTALS_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Running:
    """A contender that is up.

    Attributes:
        url: where clients talk to it.
        totals: the folder of its engines' totals, which others may use too while it rests.
    """

    contender: Contender
    url: str
    totals: Path
    usage: Usage

    async def done(self, requests: int = 0) -> Stats:
        """What its engines have done, once they are said to have had so many requests.

        Raises:
            TimeoutError: they never are.
        """
        async with asyncio.timeout(TOTALS_TIMEOUT_S):
            while True:
                await asyncio.sleep(2 * WRITE_EVERY_S)  # after which an engine at rest has told all
                totals = read_totals(self.totals)
                if totals.requests >= requests:
                    return totals


async def start(
    fleet: Fleet, http: aiohttp.ClientSession, contenders: Sequence[Contender], engines: int
) -> list[Running]:
    """Start contenders, each family with so many engines, and wait until they serve."""
    of = {family: [c for c in contenders if c.family is family] for family in Family}
    fleet.start(engines if of[Family.OURS] else 0, 0)
    plain = [_start_data_parallel(fleet, each, engines) for each in of[Family.DATA_PARALLEL]]
    routed = [_start_router(fleet, each, engines) for each in of[Family.VLLM_ROUTER]]
    ours = await _start_ours(fleet, http, of[Family.OURS])
    for server, _ in plain:
        await asyncio.to_thread(server.wait_for_status, 200)
    for router, servers, _ in routed:
        for server in (*servers, router):
            await asyncio.to_thread(server.wait_for_status, 200)
    running = [
        *ours,
        *(
            _running(each, server, {Role.API_SERVER: [server]}, totals)
            for each, (server, totals) in zip(of[Family.DATA_PARALLEL], plain, strict=True)
        ),
        *(
            _running(each, router, {Role.ROUTER: [router], Role.API_SERVER: servers}, totals)
            for each, (router, servers, totals) in zip(of[Family.VLLM_ROUTER], routed, strict=True)
        ),
    ]
    return sorted(running, key=lambda each: contenders.index(each.contender))


def _running(
    contender: Contender,
    server: HttpServer,
    roots: dict[Role, Sequence[Process]],
    totals: Path,
) -> Running:
    engines = {int(file.stem) for file in totals.glob("*.json")}
    pids = {role: [each.pid for each in processes] for role, processes in roots.items()}
    return Running(contender, server.url, totals, Usage(pids, engines))


async def _start_ours(
    fleet: Fleet, http: aiohttp.ClientSession, contenders: Sequence[Contender]
) -> list[Running]:
    """Frontends over the same workers: one has work at a time."""
    frontends = [
        fleet.start_frontend(
            each.name, flags=("--mm-arena-gb=1", QUIET_FLAG, *each.flags), env=each.env
        )
        for each in contenders
    ]
    for frontend in frontends:
        await fleet.exact(http, frontend)
    return [
        _running(
            each,
            frontend,
            {Role.FRONTEND: [frontend], Role.WORKER: fleet.workers},
            fleet.totals_folder,
        )
        for each, frontend in zip(contenders, frontends, strict=True)
    ]


def _start_data_parallel(
    fleet: Fleet, contender: Contender, engines: int
) -> tuple[HttpServer, Path]:
    totals = _totals(fleet, contender)
    flags = (f"--data-parallel-size={engines}", *contender.flags)
    return _start_server(fleet, contender.name, flags, totals), totals


def _start_router(
    fleet: Fleet, contender: Contender, engines: int
) -> tuple[HttpServer, list[HttpServer], Path]:
    """Plain servers with an engine each, and the router before them."""
    totals, port = _totals(fleet, contender), free_port()
    names = [f"{contender.name}-{number}" for number in range(engines)]
    servers = [_start_server(fleet, name, (), totals) for name in names]
    command = [
        os.environ[contender.needs or ""], "--host=127.0.0.1", f"--port={port}",
        f"--prometheus-port={free_port()}", *contender.flags,
        "--worker-urls", *(server.url for server in servers),
    ]  # fmt: skip
    router = HttpServer(contender.name, command, fleet.directory / f"{contender.name}.log", port)
    fleet.stack.callback(router.stop)
    return router, servers, totals


def _totals(fleet: Fleet, contender: Contender) -> Path:
    return fleet.directory / f"totals-{contender.name}"


def _start_server(fleet: Fleet, name: str, flags: Sequence[str], totals: Path) -> HttpServer:
    """vLLM's own server."""
    logs = fleet.directory / name
    logs.mkdir()
    flags = (CACHE_FLAG, QUIET_FLAG, *flags)
    server = start_sim_vllm(fleet.model, logs, flags, stats=totals, gpu=fleet.gpu)
    fleet.stack.callback(server.stop)
    return server
