"""What runs for a case: a worker, a frontend for each way of media, and a plain vLLM."""

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.e2e.lab import WAYS
from tests.e2e.processes import (
    START_TIMEOUT_S,
    HttpServer,
    Process,
    run_python,
    start_frontend,
    start_plain_vllm,
    start_worker,
)
from tests.families.case import DEMO, Case

MEDIA = '--limit-mm-per-prompt={"image": 4, "video": 2, "audio": 2}'
BLOCKS = "--num-gpu-blocks-override=512"
MAKE_TIMEOUT_S = 300.0
_EFFECTS = ("Engine core initialization failed", "EngineDeadError")
"""What a server says when its engine has said the cause."""


class Unbuilt(Exception):
    """There is nothing to compare with: no model, or no plain vLLM that serves it."""


class Broken(Exception):
    """Plain vLLM serves it, and ours doesn't."""


@dataclass(frozen=True)
class Servers:
    """All of one case."""

    worker: Process
    frontends: dict[str, HttpServer]
    plain: HttpServer

    def all(self) -> list[Process]:
        return [self.worker, *self.frontends.values(), self.plain]

    def stop(self) -> None:
        """All at once: each takes seconds."""
        for process in self.all():
            if process.is_alive():
                process.signal(signal.SIGTERM)
        for process in self.all():
            process.stop()

    def check_alive(self) -> None:
        """Raises ``Broken`` or ``Unbuilt`` if any has ended."""
        if not self.plain.is_alive():
            raise Unbuilt(f"plain vLLM ended: {reason(self.plain)}")
        for process in (self.worker, *self.frontends.values()):
            if not process.is_alive():
                raise Broken(f"{process.name} ended: {reason(process)}")


def reason(process: Process) -> str:
    """The line of its log that says most about why it ended."""
    lines = [line.strip() for line in process.log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and "WARNING" not in line]
    errors = [line for line in lines if re.search(r"(Error|Exception)\b.*: ", line)]
    told = [line for line in errors if not any(said in line for said in _EFFECTS)]
    last = (told or errors or lines or ["nothing in its log"])[-1]
    return re.sub(r"^\(.*?\) |ERROR \S+ \S+ \[\S+\] |\[rank\d+\]: ", "", last)[:300]


def make_model(maker: str, directory: Path, logs: Path) -> Path:
    """Make a tiny model in a process of its own, which is one that has imported vLLM.

    Raises:
        Unbuilt: it can't be made; why.
    """
    model = directory / maker
    if maker == DEMO:
        script = Path(__file__).parents[2] / "examples" / "demo_model.py"
        made = run_python(str(script), str(model))
        assert made.returncode == 0, made.stdout
        return model
    command = [sys.executable, "-m", "tests.families.make", maker, str(model)]
    process = Process(f"make-{maker}", command, logs / f"make-{maker}.log")
    try:
        if process.wait(MAKE_TIMEOUT_S):
            raise Unbuilt(reason(process))
    finally:
        process.stop()
    return model


def architecture_of(model: Path) -> str:
    config = json.loads((model / "config.json").read_bytes())
    (architecture,) = config["architectures"]
    return str(architecture)


def start(case: Case, model: Path, directory: Path, ways: Sequence[str]) -> Servers:
    """Start everything; nothing is waited for."""
    cards = directory / "cards"
    drawn = () if case.maker == DEMO else ("--load-format=sharded_state",)
    case = case.within(model.parent)
    flags = (MEDIA, BLOCKS, *drawn, *case.flags)
    frontends = {
        way: start_frontend(f"{case.name}-{way}", cards, directory, *WAYS[way][0], *case.both,
                            env=WAYS[way][1])
        for way in ways
    }  # fmt: skip
    return Servers(
        worker=start_worker(f"{case.name}-worker", model, cards, directory, *flags),
        frontends=frontends,
        plain=start_plain_vllm(model, directory, *flags, *case.both, name=f"{case.name}-plain"),
    )


@contextlib.contextmanager
def running(
    case: Case,
    model: Path,
    directory: Path,
    ways: Sequence[str],
    stop: Callable[..., None] | None = None,
) -> Iterator[Servers]:
    """Everything, ready to be asked.

    Args:
        ways: how media travel, with a frontend for each.
        stop: ends all processes, instead of ``Servers.stop``.

    Raises:
        Unbuilt, Broken: as ``Servers.check_alive`` does.
    """
    servers = start(case, model, directory, ways)
    try:
        _wait(servers)
        yield servers
    finally:
        if stop is None:
            servers.stop()
        else:
            stop(*servers.all())


def _wait(servers: Servers) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    waiting = {process.name: process for process in (*servers.frontends.values(), servers.plain)}
    while waiting:
        servers.check_alive()
        if time.monotonic() > deadline:
            if servers.plain.name in waiting:
                raise Unbuilt("plain vLLM does not become ready")
            raise Broken(f"not ready: {', '.join(waiting)}")
        time.sleep(0.3)
        for name, process in list(waiting.items()):
            if _ready(process, plain=process is servers.plain):
                del waiting[name]


def _ready(process: HttpServer, *, plain: bool) -> bool:
    try:
        if plain or not process.is_ready():
            return process.is_ready()
        views = httpx.get(f"{process.url}/mmrouter/workers", timeout=5).json()
    except httpx.TransportError:
        return False
    return bool(views) and all(view["connected"] for view in views)
