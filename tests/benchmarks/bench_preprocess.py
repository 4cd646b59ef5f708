"""How many media requests a frontend gets ready per second, beside vLLM's GPU-less renderer.

    python -m tests.benchmarks.bench_preprocess

One run has all of them, taking turns: ``vllm launch render`` and frontends with 0, 1 and 2
processes for media, over a worker that answers at once. Every picture is new to the server that
gets it. The renderer answers with the tensors as JSON, which is how it hands them on; a frontend
writes them to shared memory, routes and streams.

Ends with one line of JSON; docs/media.md says what its fields mean.
"""

import argparse
import asyncio
import base64
import io
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from PIL import Image

from tests.benchmarks.telling import telling
from tests.e2e.processes import HttpServer, Process
from tests.ports import free_port

MAX_MODEL_LEN = 65536
PAGES = 30
PAGE_SIZE = (794, 1123)
"""A4 at 96 dots per inch."""

IN_FLIGHT = 8
PICTURES_PER_ROUND = 16
SINGLE = 15


def photo(seed: int, size: tuple[int, int] = (1024, 1024)) -> str:
    """A JPEG of a few hundred kilobytes that no other seed gives, as a data URI."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    grain = random.integers(-10, 11, (size[1], size[0], 1), dtype=np.int16)
    pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def body(urls: Sequence[str], text: str = "describe") -> bytes:
    content: list[object] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": text})
    return json.dumps(
        {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    ).encode()


@dataclass
class Server:
    """One of those that are compared.

    Attributes:
        path: where it takes requests.
        stall_file: where it says how its event loop fared, if it can.
    """

    name: str
    process: HttpServer
    path: str
    stall_file: Path | None = None
    rates: dict[str, list[float]] = field(default_factory=dict)
    stalls: list[dict[str, float]] = field(default_factory=list)

    async def post(self, session: aiohttp.ClientSession, payload: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        async with session.post(
            self.process.url + self.path, data=payload, headers=headers
        ) as reply:
            answer = await reply.read()
            assert reply.status == 200, answer[:1000]

    async def throughput(
        self, session: aiohttp.ClientSession, what: str, payloads: Sequence[bytes]
    ) -> None:
        """Requests per second with some in flight all the time."""
        waiting = iter(payloads)

        async def client() -> None:
            for payload in waiting:
                await self.post(session, payload)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(min(IN_FLIGHT, len(payloads)))))
        rate = len(payloads) / (time.perf_counter() - began)
        self.rates.setdefault(what, []).append(rate)

    async def latency(self, session: aiohttp.ClientSession, payload: bytes) -> float:
        """Of one request, in milliseconds."""
        began = time.perf_counter()
        await self.post(session, payload)
        return (time.perf_counter() - began) * 1e3

    async def processing_ms(self, session: aiohttp.ClientSession) -> float:
        """What it has spent on media so far, fetching aside."""
        async with session.get(self.process.url + "/metrics") as reply:
            for line in (await reply.text()).splitlines():
                if line.startswith('mmrouter_stage_seconds_sum{stage="process_media"}'):
                    return float(line.split()[-1]) * 1e3
        return 0.0

    def take_stalls(self) -> dict[str, float] | None:
        """What it measured since the last time."""
        if self.stall_file is None:
            return None
        self.stall_file.unlink(missing_ok=True)
        self.process.signal(signal.SIGUSR1)
        while not self.stall_file.exists():
            self.process.check_alive()
            time.sleep(0.02)
        figures: dict[str, float] = json.loads(self.stall_file.read_text())
        return figures


def start_all(stack: ExitStack, work: Path) -> list[Server]:
    model, cards = work / "model", work / "cards"
    cards.mkdir(mode=0o700, exist_ok=True)
    script = Path(__file__).parents[2] / "examples" / "demo_model.py"
    subprocess.run([sys.executable, str(script), str(model)], check=True, capture_output=True)
    environment = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    worker = Process(
        "worker",
        [
            sys.executable, "-m", "tests.benchmarks.instant_worker",
            str(model), str(cards), str(MAX_MODEL_LEN), str(PAGES),
        ],
        work / "worker.log",
    )  # fmt: skip
    stack.callback(worker.stop)
    servers = []
    port = free_port()
    renderer = HttpServer(
        "vllm launch render",
        [
            sys.executable, "-m", "tests.benchmarks.plain_renderer", f"--model={model}",
            "--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--served-model-name=demo",
            f"--max-model-len={MAX_MODEL_LEN}", f'--limit-mm-per-prompt={{"image": {PAGES}}}',
            "--disable-uvicorn-access-log",
        ],
        work / "renderer.log",
        port,
        **environment,
    )  # fmt: skip
    stack.callback(renderer.stop)
    servers.append(Server("vllm launch render", renderer, "/v1/chat/completions/render"))
    for count in (0, 1, 2):
        port = free_port()
        stalls = work / f"stalls-{count}.json"
        frontend = HttpServer(
            f"frontend, N = {count}",
            [
                sys.executable, "-m", "tests.benchmarks.watched_frontend", str(stalls),
                f"--discovery={cards}", f"--port={port}", "--mm-arena-gb=0.5",
                f"--preprocess-workers={count}", "--disable-uvicorn-access-log",
                "--media-cache-mb=64",
            ],
            work / f"frontend-{count}.log",
            port,
            **environment,
        )  # fmt: skip
        stack.callback(frontend.stop)
        servers.append(Server(frontend.name, frontend, "/v1/chat/completions", stalls))
    for server in servers:
        server.process.wait_for_status(200)
    return servers


def pictures(seeds: Iterator[int], count: int) -> list[bytes]:
    return [body([photo(next(seeds))]) for _ in range(count)]


def document(seeds: Iterator[int]) -> bytes:
    return body([photo(next(seeds), PAGE_SIZE) for _ in range(PAGES)])


async def measure(servers: Sequence[Server], rounds: int) -> dict[str, float]:
    seeds = iter(range(10**9))
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for server in servers:  # warm up
            for payload in [body([]), *pictures(seeds, 2)]:
                await server.post(session, payload)
            server.take_stalls()
        for _ in range(rounds):
            new = await asyncio.to_thread(pictures, seeds, PICTURES_PER_ROUND)
            pages = await asyncio.to_thread(document, seeds)
            for server in servers:
                await server.throughput(session, "1024x1024", new)
                await server.throughput(session, "30 pages", [pages])
                if (stalls := server.take_stalls()) is not None:
                    server.stalls.append(stalls)
        frontend = servers[1]
        times: defaultdict[str, list[float]] = defaultdict(list)
        for number in range(SINGLE):
            url = photo(next(seeds))
            words = f"number {number}"
            times["text"].append(await frontend.latency(session, body([], words)))
            before = await frontend.processing_ms(session)
            times["first"].append(await frontend.latency(session, body([url], words)))
            between = await frontend.processing_ms(session)
            times["repeat"].append(await frontend.latency(session, body([url], words)))
            after = await frontend.processing_ms(session)
            times["first, processing"].append(between - before)
            times["repeat, processing"].append(after - between)
    return report(servers, {key: statistics.median(values) for key, values in times.items()})


def report(servers: Sequence[Server], single: dict[str, float]) -> dict[str, float]:
    kinds = list(servers[0].rates)
    print(f"{'requests per second':24}" + "".join(f"{kind:>14}" for kind in kinds), end="")
    print(f"{'stall p99 ms':>14}{'max ms':>10}")
    ratios: dict[str, float] = {}
    for server in servers:
        line = f"{server.name:24}"
        for kind in kinds:
            line += f"{statistics.median(server.rates[kind]):14.2f}"
        if server.stalls:
            line += f"{statistics.median(each['p99'] for each in server.stalls):14.1f}"
            line += f"{max(each['max'] for each in server.stalls):10.1f}"
        print(line)
        # Side by side in each round, so that what else the machine does cancels out.
        theirs = servers[0].rates
        ratios[server.name] = min(
            statistics.median(
                mine / other for mine, other in zip(server.rates[kind], theirs[kind], strict=True)
            )
            for kind in kinds
        )
    print("\none request at a time, N = 0, milliseconds")
    for key, value in single.items():
        print(f"{key:24}{value:14.1f}")
    return {
        "vs_render_n0": ratios[servers[1].name],
        "vs_render_n2": ratios[servers[3].name],
        "stall_ms_max": statistics.median(
            max(one["max"], two["max"])
            for one, two in zip(servers[2].stalls, servers[3].stalls, strict=True)
        ),
        "repeat_fraction": single["repeat, processing"] / single["first, processing"],
        "repeat_over_text_ms": single["repeat"] - single["text"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="bench-preprocess-") as work, ExitStack() as stack:
        with telling("starting servers"):
            servers = start_all(stack, Path(work))
        with telling(f"measuring, {rounds} rounds"):
            figures = asyncio.run(measure(servers, rounds))
    print("\n" + json.dumps({key: round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
