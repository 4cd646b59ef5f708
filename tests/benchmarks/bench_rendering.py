"""New pictures where the frontend's core is the bottleneck: processed there, or left to workers.

    python -m tests.benchmarks.bench_rendering [--clients 16] [--side 896] [--rounds 5]

Two frontends over the same workers, whose GPU is the clock: one processes all pictures itself, one
has ``--preprocess-on-workers``. They take turns in blocks of the same traffic; every picture is
asked about once. All of a frontend runs on one core, workers and clients on the others.

Ends with one line of JSON: medians over blocks, and over pairs of blocks where it says ``_vs_``.
"""

import argparse
import asyncio
import base64
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.benchmarks.bench_tokens import trees
from tests.benchmarks.fleet_processes import FRONTEND_FLAGS, Fleet
from tests.benchmarks.serving.photos import Photos
from tests.benchmarks.telling import telling
from tests.e2e.processes import HttpServer
from tests.simgpu.gpu import GpuModel
from tests.simgpu.totals import LATE_SHARE, late_share, since

ARMS = {"here": (), "workers": ("--preprocess-on-workers",)}
TOKENS = 4
"""Of each answer."""


class Pictures:
    """JPEGs that nobody has seen: a few, each with another comment in it every time.

    Args:
        side: in pixels.
    """

    def __init__(self, side: int) -> None:
        photos = Photos(side)
        uris = [photos.uri(f"picture {number}") for number in range(8)]
        self._files = [base64.b64decode(uri.partition(",")[2]) for uri in uris]
        self._count = itertools.count(random.getrandbits(60) << 32)

    def new(self) -> str:
        """A data URL."""
        number = next(self._count)
        file, comment = self._files[number % len(self._files)], b"%032x" % number
        file = file[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + file[2:]
        return "data:image/jpeg;base64," + base64.b64encode(file).decode()


@dataclass
class Block:
    """What came of one turn of an arm.

    Attributes:
        first: milliseconds to the first token, of each request.
        left: share of the pictures that workers processed.
        frontend_ms, worker_ms: of CPU for each request, without the engines'.
        late: of the engines.
    """

    throughput: float
    first: list[float]
    left: float
    frontend_ms: float
    worker_ms: float
    late: float

    def percentile(self, share: float) -> float:
        return sorted(self.first)[int(share * (len(self.first) - 1))]


@dataclass
class Arm:
    name: str
    frontend: HttpServer
    blocks: list[Block] = field(default_factory=list)


class Race:
    """Runs blocks."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        fleet: Fleet,
        args: argparse.Namespace,
    ) -> None:
        self._http = http
        self._fleet = fleet
        self._pictures = Pictures(args.side)
        self._clients: int = args.clients
        self._seconds: float = args.seconds

    async def block(self, arm: Arm) -> Block:
        before, left = await self._fleet.totals(), await self._left(arm)
        cpu = self._cpu(arm)
        began = time.monotonic()
        first: list[float] = []
        await asyncio.gather(
            *(self._client(arm, first, began + self._seconds) for _ in range(self._clients))
        )
        seconds, count = time.monotonic() - began, len(first)
        spent = [after - then for after, then in zip(self._cpu(arm), cpu, strict=True)]
        return Block(
            count / seconds,
            first,
            (await self._left(arm) - left) / count,
            spent[0] / count * 1e3,
            spent[1] / count * 1e3,
            late_share(since(before, await self._fleet.totals())),
        )

    def _cpu(self, arm: Arm) -> tuple[float, float]:
        return trees(arm.frontend.pid), trees(*(each.pid for each in self._fleet.workers))

    async def _client(self, arm: Arm, first: list[float], until: float) -> None:
        while time.monotonic() < until:
            url = self._pictures.new()
            began = time.monotonic()
            first.append((await self.ask(arm, url))[0] - began)

    async def ask(self, arm: Arm, url: str) -> tuple[float, str]:
        """When the first token came, and the answer."""
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is it?"},
        ]
        body = {
            "model": "demo",
            "max_tokens": TOKENS,
            "stream": True,
            "messages": [{"role": "user", "content": content}],
        }
        came, text = 0.0, ""
        async with self._http.post(f"{arm.frontend.url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    if choices and choices[0]["delta"].get("content"):
                        came = came or time.monotonic()
                        text += choices[0]["delta"]["content"]
        return came or time.monotonic(), text

    async def _left(self, arm: Arm) -> float:
        async with self._http.get(f"{arm.frontend.url}/metrics") as reply:
            families = text_string_to_metric_families(await reply.text())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "mmrouter_rendering_choices_total"
            and sample.labels["place"] == "worker"
        )


def pin(pids: Sequence[int], cores: set[int]) -> None:
    """Have processes, what they started, and all of their threads run on some cores only."""
    for pid in pids:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)


async def run(fleet: Fleet, args: argparse.Namespace) -> list[Arm]:
    """All blocks of all arms."""
    flags = (*FRONTEND_FLAGS, f"--preprocess-workers={args.processes}")
    arms = [
        Arm(name, fleet.start_frontend(name, flags=[*flags, *more])) for name, more in ARMS.items()
    ]
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector) as http:
        with telling("starting engines and frontends"):
            for arm in arms:
                await fleet.exact(http, arm.frontend)
        cores = sorted(os.sched_getaffinity(0))
        pin([arm.frontend.pid for arm in arms], {cores[0]})
        pin([os.getpid(), *(each.pid for each in fleet.workers)], set(cores[1:] or cores))
        race = Race(http, fleet, args)
        for turn in range(args.rounds + 1):
            for arm in arms if turn % 2 else reversed(arms):
                block = await race.block(arm)
                _say(arm, block, "" if turn else "  warms up")
                if turn:
                    arm.blocks.append(block)
        for _ in range(args.compared):
            picture = Pictures(args.side).new()
            answers = {(await race.ask(arm, picture))[1] for arm in arms}
            assert len(answers) == 1, answers
    return arms


def _say(arm: Arm, block: Block, more: str) -> None:
    late = "  late" if block.late > LATE_SHARE else ""
    print(
        f"{arm.name:8} {block.throughput:6.1f}/s  first p50 {block.percentile(0.5) * 1e3:6.0f} "
        f"p99 {block.percentile(0.99) * 1e3:6.0f} ms  left {block.left:4.0%}  CPU frontend "
        f"{block.frontend_ms:5.1f} workers {block.worker_ms:5.1f} ms{late}{more}",
        flush=True,
    )


def _medians(arm: Arm) -> Iterator[tuple[str, float]]:
    blocks = arm.blocks
    yield "throughput", statistics.median(each.throughput for each in blocks)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        yield (
            f"first_{name}_ms",
            statistics.median(each.percentile(share) for each in blocks) * 1e3,
        )
    yield "left", statistics.median(each.left for each in blocks)
    yield "frontend_ms", statistics.median(each.frontend_ms for each in blocks)
    yield "worker_ms", statistics.median(each.worker_ms for each in blocks)


def report(arms: Sequence[Arm]) -> dict[str, float]:
    """The figures."""
    figures = {f"{arm.name}_{name}": value for arm in arms for name, value in _medians(arm)}
    pairs = list(zip(*(arm.blocks for arm in arms), strict=True))
    ratios = [workers.throughput / here.throughput for here, workers in pairs]
    figures["workers_vs_here_throughput"] = statistics.median(ratios)
    figures["workers_vs_here_throughput_least"] = min(ratios)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        figures[f"workers_vs_here_first_{name}"] = statistics.median(
            workers.percentile(share) / here.percentile(share) for here, workers in pairs
        )
    figures["late"] = max(each.late for arm in arms for each in arm.blocks)
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16, help="closed loop")
    parser.add_argument("--side", type=int, default=896, help="of the pictures, in pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a block")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--speed", type=float, default=8.0, help="of each GPU, in H100s")
    parser.add_argument("--processes", type=int, default=0, help="--preprocess-workers")
    parser.add_argument("--compared", type=int, default=4, help="pictures shown to both at the end")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-rendering-") as work, ExitStack() as stack:
        fleet = Fleet(stack, Path(work), GpuModel(speed=args.speed))
        fleet.start(args.workers, 0)
        arms = asyncio.run(run(fleet, args))
    print("\n" + json.dumps(report(arms)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
