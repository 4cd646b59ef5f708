"""CPU time that a streamed token takes: in frontend, worker and vLLM's own server.

    python -m tests.benchmarks.bench_tokens [--beside CHECKOUT] [--kinds KIND …] [--no-vllm]

Engines are simulated, so they leave the cores to what is measured. A worker with a frontend and
vLLM's own server are up at the same time and take turns in blocks: so many streams, and CPU time is
read when the last of them has begun and again when the first of them ends. Another checkout of this
project can take turns with this one. Streams of several kinds are measured one kind after another.

Ends with one line of JSON: microseconds for each token (for each event, if a stream has several
choices), medians of blocks, and the spread between the lowest and the highest. With --flames it
ends with the flame graphs that it drew instead, since processes that are sampled are slower.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.benchmarks.flames import NoProfilerError, find_profiler, record
from tests.benchmarks.telling import telling
from tests.e2e.processes import ENGINE_FLAGS, SERVER_FLAGS, HttpServer, Process, card_path
from tests.ports import free_port
from tests.simgpu.gpu import GpuModel
from tests.simgpu.start import EXECUTOR, start_sim_vllm
from tests.simgpu.stats import FOLDER_VARIABLE, WRITE_EVERY_S
from tests.simgpu.totals import late_share, read_totals, since

HERE = Path(__file__).parents[2]
END = b"\n\n"
DONE = (b"data: [DONE]", b"event: message_stop", b"event: response.completed")
HEAD_EVENTS = 6
"""Of a stream, at most, that say what comes; not measured."""

CHATS = "/v1/chat/completions"
USAGE: dict[str, object] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}
}
FUNCTION = {"name": "look_up", "parameters": {"type": "object", "properties": {}}}
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "plain": (CHATS, {}),
    "usage": (CHATS, USAGE),
    "logprobs": (CHATS, {"logprobs": True, "top_logprobs": 2}),
    "choices": (CHATS, {"n": 2}),
    "tools": (CHATS, {"tools": [{"type": "function", "function": FUNCTION}]}),
    "completions": ("/v1/completions", {}),
    "completions-usage": ("/v1/completions", USAGE),
    "messages": ("/v1/messages", {}),
    "responses": ("/v1/responses", {}),
}
"""Streams by name: route, and fields beside those that each has."""


def trees(*pids: int) -> float:
    """Seconds of CPU of processes and what they started, engines aside."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        process = psutil.Process(pid)
        found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    own = [each for each in found.values() if "EngineCore" not in " ".join(each.cmdline())]
    times = [each.cpu_times() for each in own]
    return sum(each.user + each.system for each in times)


@dataclass
class Contender:
    """A server, and whose CPU counts.

    Attributes:
        server: answers; waited for once all have been started.
        find: the processes, by role, once it answers.
        us: microseconds for each token of each block, by kind of stream and role.
    """

    name: str
    server: HttpServer
    find: Callable[[], dict[str, int]]
    us: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def cpu(self) -> dict[str, float]:
        """Seconds so far, by role."""
        return {role: trees(pid) for role, pid in self.find().items()}


@dataclass
class Block:
    """So many streams at once."""

    contender: Contender
    port: int
    kind: str
    streams: int
    tokens: int
    begun: int = 0
    events: int = 0
    first: tuple[int, dict[str, float]] | None = None
    last: tuple[int, dict[str, float]] | None = None

    async def run(self) -> None:
        """Run it, and note what a token took."""
        self.contender.server.check_alive()
        await asyncio.gather(*(self._stream(number) for number in range(self.streams)))
        assert self.first is not None and self.last is not None, "no moment with all streams"
        count = self.last[0] - self.first[0]
        for role, seconds in self.last[1].items():
            spent = (seconds - self.first[1][role]) / count * 1e6
            self.contender.us.setdefault((self.kind, role), []).append(spent)

    async def _stream(self, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(_request(self.kind, number, self.tokens))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        for _ in range(HEAD_EVENTS):
            await reader.readuntil(END)
        self.begun += 1
        if self.begun == self.streams:
            self.first = (self.events, self.contender.cpu())
        while not _ends(await reader.readuntil(END)):
            self.events += 1
        if self.last is None:
            self.last = (self.events, self.contender.cpu())
        writer.close()


def _serving(cards: Path, worker: str) -> int:
    """The process that serves as a worker. Another checkout's card may have another version."""
    pid = json.loads(card_path(cards, worker).read_bytes())["host"]["pid"]
    assert isinstance(pid, int)
    return pid


def _ends(event: bytes) -> bool:
    return any(last in event for last in DONE)


def _request(kind: str, number: int, tokens: int) -> bytes:
    path, fields = KINDS[kind]
    question = f"question {number}"
    asked: dict[str, object] = {"messages": [{"role": "user", "content": question}]}
    if path == "/v1/completions":
        asked = {"prompt": question}
    elif path == "/v1/responses":
        asked = {"input": question}
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = json.dumps({"model": "demo", "stream": True, length: tokens} | asked | fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Lab:
    """Where contenders are started."""

    def __init__(self, stack: ExitStack, work: Path, gpu: GpuModel) -> None:
        self._stack = stack
        self._work = work
        self._gpu = gpu
        self._model = work / "model"
        self.totals = work / "totals"
        script = HERE / "examples" / "demo_model.py"
        subprocess.run([sys.executable, script, self._model], check=True, capture_output=True)

    def ours(self, name: str, checkout: Path) -> Contender:
        """A worker and a frontend of a checkout."""
        # Not forked: what was imported there is this checkout.
        within = ["env", "-C", str(checkout), sys.executable, "-m"]
        env = self._gpu.to_env() | {FOLDER_VARIABLE: str(self.totals), "PYTHONPATH": str(checkout)}
        cards, worker, port = self._work / f"cards-{name}", f"worker-{name}", free_port()
        cards.mkdir(mode=0o700, exist_ok=True)
        process = Process(
            worker,
            [
                *within, "backend_worker", f"--model={self._model}", f"--worker-id={worker}",
                f"--discovery={cards}", *ENGINE_FLAGS, SERVER_FLAGS[-1], EXECUTOR,
            ],
            self._work / f"{worker}.log",
            **env,
        )  # fmt: skip
        self._stack.callback(process.stop)
        frontend = HttpServer(
            f"frontend-{name}",
            [
                *within, "frontend", f"--discovery={cards}", f"--port={port}",
                "--mm-arena-gb=0.25", "--disable-uvicorn-access-log", *SERVER_FLAGS[:-1],
            ],
            self._work / f"frontend-{name}.log",
            port,
            PYTHONPATH=str(checkout),
        )  # fmt: skip
        self._stack.callback(frontend.stop)
        return Contender(
            name,
            frontend,
            lambda: {"frontend": frontend.pid, "worker": _serving(cards, worker)},
        )

    def vllm(self) -> Contender:
        """vLLM's own server."""
        flags = ["--disable-uvicorn-access-log"]
        server = start_sim_vllm(self._model, self._work, flags, stats=self.totals, gpu=self._gpu)
        self._stack.callback(server.stop)
        return Contender("vllm", server, lambda: {"api_server": server.pid})


async def measure(contenders: Sequence[Contender], args: argparse.Namespace) -> None:
    """Blocks in turn, the order rotating; the first of each kind warms up."""
    for kind in args.kinds:
        for turn in range(args.rounds + 1):
            at = turn % len(contenders)
            for each in (*contenders[at:], *contenders[:at]):
                port = int(each.server.url.rpartition(":")[2])
                await Block(each, port, kind, args.streams, args.tokens).run()
                last = {role: round(us[-1], 1) for (of, role), us in each.us.items() if of == kind}
                print(f"{kind:18}{each.name:8} {last}", flush=True)
                if not turn:
                    each.us = {key: us for key, us in each.us.items() if key[0] != kind}


async def sample(contenders: Sequence[Contender], args: argparse.Namespace) -> list[Path]:
    """Draw what their processes do while blocks run; the graphs."""
    pids = {f"{each.name}-{role}": pid for each in contenders for role, pid in each.find().items()}
    load = asyncio.create_task(measure(contenders, args))
    try:
        graphs = await asyncio.to_thread(record, pids, args.seconds, args.flames)
    finally:
        load.cancel()
        await asyncio.wait([load])
    if not load.cancelled():
        load.result()  # it ended before it was told to, so the graphs are of idle processes
    return graphs


def report(contenders: Sequence[Contender], args: argparse.Namespace) -> dict[str, float]:
    """Print the blocks; the figures."""
    figures: dict[str, float] = {}
    for each in contenders:
        for (kind, role), us in each.us.items():
            name = role if each.name in ("this", "vllm") else f"{each.name}_{role}"
            if len(args.kinds) > 1:
                name = f"{kind}_{name}"
            print(f"{name:40}" + " ".join(f"{one:6.0f}" for one in us))
            figures[f"{name}_us_per_token"] = round(statistics.median(us), 1)
            figures[f"{name}_spread"] = round(max(us) - min(us), 1)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=150, help="of each answer")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["plain"], help="of streams")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--step-ms", type=float, default=30.0, help="of an engine, in which it sleeps"
    )
    parser.add_argument("--beside", type=Path, help="another checkout of this project")
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--flames", type=Path, help="draw flame graphs here; needs py-spy")
    parser.add_argument("--seconds", type=int, default=60, help="of sampling, for --flames")
    args = parser.parse_args()
    if args.flames:
        try:
            find_profiler()
        except NoProfilerError as error:
            parser.error(str(error))
    gpu = GpuModel(step_ms=args.step_ms, prefill_ms=0.001, context_ms=0.0)
    with tempfile.TemporaryDirectory(prefix="bench-tokens-") as work, ExitStack() as stack:
        lab = Lab(stack, Path(work), gpu)
        with telling("starting engines and servers"):
            contenders = [lab.ours("this", HERE)]
            if args.beside:
                contenders.append(lab.ours("beside", args.beside.absolute()))
            if not args.no_vllm:
                contenders.append(lab.vllm())
            for each in contenders:
                each.server.wait_for_status(200)
        if args.flames:
            args.rounds = 1 << 30
            with telling("sampling"):
                graphs = asyncio.run(sample(contenders, args))
            print("\n" + json.dumps({"graphs": [str(each) for each in graphs]}))
            return
        before = read_totals(lab.totals)
        with telling(f"measuring, {args.rounds} rounds"):
            asyncio.run(measure(contenders, args))
        figures = report(contenders, args)
        time.sleep(2 * WRITE_EVERY_S)
        figures["late_share"] = round(late_share(since(before, read_totals(lab.totals))), 4)
    print("\n" + json.dumps(figures))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
