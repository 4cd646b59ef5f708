"""Starts other projects' routers, each with the flags that its documentation asks for."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from tests.benchmarks.fleet_traffic import BLOCK_SIZE
from tests.benchmarks.serving.contenders import KV_AWARE, Contender, Family, Foreign, Role
from tests.benchmarks.serving.running import Running
from tests.benchmarks.serving.stacks import CACHE_FLAG, Ground, Ready
from tests.e2e.processes import ENGINE_FLAGS, START_TIMEOUT_S, HttpServer, Process
from tests.ports import free_port

ROOT: Final = Path(__file__).parents[3]


def start_routers(ground: Ground, contenders: Sequence[Contender]) -> Ready:
    """vllm-router, once for each policy, before the same servers of vLLM's with an engine each."""
    family = Family.VLLM_ROUTER
    ports = [free_port() for _ in range(ground.engines.count)]
    asked = any(each.name == KV_AWARE for each in contenders)
    servers = [
        ground.vllm(
            family, f"vllm-{number}", *([_events_flag(port)] if asked else []), number=number
        )
        for number, port in enumerate(ports)
    ]
    events = [
        f"--kv-event-source={server.url}=tcp://127.0.0.1:{port}"
        for server, port in zip(servers, ports, strict=True)
    ] + [f"--kv-event-block-size={BLOCK_SIZE}", "--kv-event-model=demo"]

    async def ready() -> list[Running]:
        for server in servers:
            await asyncio.to_thread(server.wait_for_status, 200)
        running = []
        for each in contenders:
            router = _router(ground, each, servers, events if each.name == KV_AWARE else ())
            await asyncio.to_thread(router.wait_for_status, 200)
            roots = {Role.ROUTER: [router], Role.API_SERVER: servers}
            totals = ground.totals(family.name)
            running.append(Running.of(each, router, roots, totals, servers))
        return running

    return ready


def _router(
    ground: Ground, contender: Contender, servers: Sequence[HttpServer], events: Sequence[str]
) -> HttpServer:
    port = free_port()
    command = [
        _foreign(contender).program(), "--host=127.0.0.1", f"--port={port}",
        f"--prometheus-port={free_port()}", *contender.flags, *events,
        "--worker-urls", *(server.url for server in servers),
    ]  # fmt: skip
    log = ground.fleet.directory / f"{contender.name}.log"
    router = HttpServer(contender.name, command, log, port)
    ground.fleet.stack.callback(router.stop)
    return router


def start_dynamo(ground: Ground, contenders: Sequence[Contender]) -> Ready:
    """Dynamo's frontends over the same workers of its."""
    directory = ground.directory("dynamo-processes")
    python = _foreign(contenders[0]).program()
    env = _dynamo_env(directory)
    workers = [
        _dynamo_worker(ground, python, directory, number, env)
        for number in range(ground.engines.count)
    ]
    frontends = [_dynamo_frontend(ground, each, python, directory, env) for each in contenders]

    async def ready() -> list[Running]:
        for frontend in frontends:
            await _all_there(ground, frontend, workers)
        totals = ground.totals(Family.DYNAMO.name)
        return [
            Running.of(each, frontend, {Role.FRONTEND: [frontend], Role.WORKER: workers}, totals)
            for each, frontend in zip(contenders, frontends, strict=True)
        ]

    return ready


def _dynamo_env(directory: Path) -> dict[str, str]:
    """Processes find each other by files, without etcd and NATS, and talk over loopback."""
    hosts = (
        "DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST",
        "DYN_SYSTEM_HOST", "VLLM_HOST_IP",
    )  # fmt: skip
    return {
        "PYTHONPATH": str(ROOT),  # for engines whose GPU is the clock
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(directory / "kv"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYNAMO_MM_TRANSFER": "shm",
        **dict.fromkeys(hosts, "127.0.0.1"),
    }


def _dynamo_worker(
    ground: Ground, python: str, directory: Path, number: int, env: Mapping[str, str]
) -> Process:
    command = [
        python, "-m", "dynamo.vllm", f"--model={ground.fleet.model}", "--enable-multimodal",
        *ENGINE_FLAGS, CACHE_FLAG, *ground.engines.flags, _events_flag(free_port()),
    ]  # fmt: skip
    log = directory / f"worker-{number}.log"
    worker = Process(log.stem, command, log, **env, **ground.engine_env(Family.DYNAMO.name, number))
    ground.fleet.stack.callback(worker.stop)
    return worker


def _dynamo_frontend(
    ground: Ground, contender: Contender, python: str, directory: Path, env: Mapping[str, str]
) -> HttpServer:
    port = free_port()
    command = [
        python, "-m", "dynamo.frontend", "--http-host=127.0.0.1", f"--http-port={port}",
        "--dyn-chat-processor=vllm", f"--kv-cache-block-size={BLOCK_SIZE}", *contender.flags,
    ]  # fmt: skip
    log = directory / f"{contender.name}.log"
    frontend = HttpServer(contender.name, command, log, port, **env)
    ground.fleet.stack.callback(frontend.stop)
    return frontend


def _events_flag(port: int) -> str:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": f"tcp://*:{port}",  # vLLM binds only where there is a star
    }
    return f"--kv-events-config={json.dumps(config)}"


def _foreign(contender: Contender) -> Foreign:
    assert contender.foreign is not None
    return contender.foreign


class _Instance(msgspec.Struct):
    endpoint: str


class _Health(msgspec.Struct):
    instances: list[_Instance] = []


_HEALTH = msgspec.json.Decoder(_Health)


async def _all_there(ground: Ground, frontend: HttpServer, workers: Sequence[Process]) -> None:
    """Wait until a frontend of Dynamo's knows all workers."""
    async with asyncio.timeout(2 * START_TIMEOUT_S):
        while True:
            for process in (frontend, *workers):
                process.check_alive()
            with contextlib.suppress(aiohttp.ClientError, msgspec.DecodeError):
                async with ground.http.get(f"{frontend.url}/health") as reply:
                    health = _HEALTH.decode(await reply.read())
                able = [each for each in health.instances if each.endpoint == "generate"]
                if len(able) == len(workers):
                    return
            await asyncio.sleep(0.5)
