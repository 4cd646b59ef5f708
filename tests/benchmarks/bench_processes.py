"""How much more a frontend of two processes serves than one of one, on two cores.

    python -m tests.benchmarks.bench_processes

Both are up at the same time, over one worker whose engine answers at once, and take turns in short
blocks: a closed loop of requests of text, and one of a few pictures that repeat. Client and worker
need the cores too, and so does whatever else the machine does; so what counts is the ratio of two
blocks that follow each other, and of those the median. Beside it stands what does not depend on
who else had the cores: the CPU time that a request takes of a frontend of one process, over what
it takes of the busier of two (or of their parent, if that is the busiest).

Ends with one line of JSON; docs/operations.md says what its fields mean.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.benchmarks.telling import telling
from tests.e2e.processes import HttpServer, Process
from tests.pictures import data_uri, picture
from tests.ports import free_port

CONNECTIONS = 16
PICTURES = 4
_LENGTH = re.compile(rb"content-length: (\d+)", re.I)
_SAMPLE = re.compile(r'mmrouter_requests_total\{process="(\d+)",outcome="ok"\} (\S+)')


def request(number: int, url: str | None) -> bytes:
    """A request as it goes over the wire: the client is to cost as little as it can."""
    content: list[object] = [{"type": "text", "text": f"question {number}"}]
    if url is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    body = json.dumps(
        {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class Server:
    """One of those that are compared."""

    processes: int
    server: HttpServer
    port: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)

    def cpu_s(self) -> list[float]:
        """Of each of its processes so far."""
        parent = psutil.Process(self.server.pid)
        times = [each.cpu_times() for each in (parent, *parent.children())]
        return [each.user + each.system for each in times]

    async def block(self, what: str, requests: Sequence[bytes], seconds: float) -> None:
        """Requests per second of a closed loop."""
        deadline = time.perf_counter() + seconds
        done = 0

        async def client(first: int) -> None:
            nonlocal done
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            turn = first
            while time.perf_counter() < deadline:
                writer.write(requests[turn % len(requests)])
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                length = _LENGTH.search(head)
                assert length is not None, head
                await reader.readexactly(int(length[1]))
                done += 1
                turn += 1
            writer.close()

        before = self.cpu_s()
        began = time.perf_counter()
        await asyncio.gather(*(client(number) for number in range(CONNECTIONS)))
        self.rates.setdefault(what, []).append(done / (time.perf_counter() - began))
        busiest = max(now - then for now, then in zip(self.cpu_s(), before, strict=True))
        self.cpu_ms.setdefault(what, []).append(busiest / done * 1e3)

    def served(self) -> dict[str, float]:
        """Requests by process."""
        page = httpx.get(self.server.url + "/metrics", timeout=30).text
        return {name: float(value) for name, value in _SAMPLE.findall(page)}


def start_all(stack: ExitStack, work: Path) -> list[Server]:
    model, cards = work / "model", work / "cards"
    cards.mkdir(mode=0o700, exist_ok=True)
    script = Path(__file__).parents[2] / "examples" / "demo_model.py"
    subprocess.run([sys.executable, str(script), str(model)], check=True, capture_output=True)
    worker = Process(
        "worker",
        [
            sys.executable, "-m", "tests.benchmarks.instant_worker",
            str(model), str(cards), "4096", "4",
        ],
        work / "worker.log",
    )  # fmt: skip
    stack.callback(worker.stop)
    servers = []
    for processes in (1, 2):
        port = free_port()
        server = HttpServer(
            f"frontend of {processes}",
            [
                sys.executable, "-m", "frontend", f"--discovery={cards}", f"--port={port}",
                f"--processes={processes}", "--mm-arena-gb=0.25", "--disable-uvicorn-access-log",
                "--log-level=warning",
            ],
            work / f"frontend-{processes}.log",
            port,
        )  # fmt: skip
        stack.callback(server.stop)
        servers.append(Server(processes, server, port))
    for each in servers:
        each.server.wait_for_status(200)
    while '"processes"' in (views := _workers(servers[1])) and not _all_connected(views):
        time.sleep(0.5)
    return servers


def _workers(server: Server) -> str:
    return httpx.get(server.server.url + "/mmrouter/workers", timeout=60).text


def _all_connected(views: str) -> bool:
    (view,) = json.loads(views)
    return bool(view["connected"]) and len(view["processes"]) == 2


async def measure(servers: Sequence[Server], rounds: int, seconds: float) -> None:
    urls = [data_uri(picture(f"picture {number}", (448, 448))) for number in range(PICTURES)]
    kinds = {
        "text": [request(number, None) for number in range(64)],
        "pictures": [request(number, urls[number % PICTURES]) for number in range(64)],
    }
    for turn in range(rounds + 1):
        for what, requests in kinds.items():
            for each in servers if turn % 2 else servers[::-1]:
                await each.block(what, requests, seconds)
        if not turn:  # what came first warmed up
            for each in servers:
                each.rates.clear()
                each.cpu_ms.clear()


def report(servers: Sequence[Server]) -> dict[str, float]:
    one, two = servers
    print(f"{'requests per second':24}" + "".join(f"{kind:>12}" for kind in one.rates))
    for each in servers:
        medians = [f"{statistics.median(rates):12.0f}" for rates in each.rates.values()]
        print(f"{each.server.name:24}" + "".join(medians))
    served = two.served().values()
    figures = {"share_of_busier": max(served) / sum(served)}
    for kind, rates in two.rates.items():
        ratios = [mine / other for mine, other in zip(rates, one.rates[kind], strict=True)]
        print(f"{kind}: " + " ".join(f"{ratio:.2f}" for ratio in ratios))
        figures[f"{kind}_2_vs_1"] = statistics.median(ratios)
        cpu = [statistics.median(each.cpu_ms[kind]) for each in servers]
        print(f"{kind}: CPU of the busiest process, ms per request: {cpu[0]:.2f}, {cpu[1]:.2f}")
        figures[f"{kind}_cpu_2_vs_1"] = cpu[0] / cpu[1]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a block")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-processes-") as work, ExitStack() as stack:
        with telling("starting a worker and two frontends"):
            servers = start_all(stack, Path(work))
        with telling(f"measuring, {args.rounds} rounds"):
            asyncio.run(measure(servers, args.rounds, args.seconds))
        figures = report(servers)
    print("\n" + json.dumps({key: round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
