"""A frontend for each way that media travel, two workers and a plain vLLM, all on one GPU.

    python -m tests.gpu.fleet --model DIRECTORY --out DIRECTORY --steps answers,first_tokens

Prints one JSON line, a :class:`tests.gpu.results.Fleet`. Logs are in ``--out``.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import httpx
import msgspec
import psutil

from tests.e2e.processes import (
    START_TIMEOUT_S,
    HttpServer,
    Process,
    start_frontend,
    start_plain_vllm,
    start_worker,
)
from tests.gpu import encodings
from tests.gpu.answers import compare_answers
from tests.gpu.client import Client
from tests.gpu.first_tokens import PLAIN, time_first_tokens
from tests.gpu.results import Answers, Encodings, FirstToken, Fleet

_P = TypeVar("_P", bound=Process)
_T = TypeVar("_T")

WORKERS: Final = ("worker-0", "worker-1")
WAYS: Final[dict[str, tuple[tuple[str, ...], dict[str, str]]]] = {
    "shm": (("--mm-arena-gb=1",), {}),
    "nixl": (("--mm-arena-gb=1",), {"DYNAMO_MM_TRANSFER": "nixl"}),
    "inline": (("--mm-arena-gb=0",), {}),
}
"""Flags and variables of a frontend whose media travel this way."""

KEEPER: Final = "worker-encodings"
_NO_FORK: Final = {"PYTHONUNBUFFERED": "1"}
"""Python reads this variable at its start, so :mod:`tests.e2e.forked` forks nothing: a process that
was forked after CUDA began could not use it."""


class Started(NamedTuple):
    """All servers, ready."""

    plain: Client
    frontends: dict[str, Client]
    keeper: tuple[Client, Path] | None
    processes: list[Process]


class Starter:
    """Starts the processes with what is common to all of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._model: Path = options.model
        self._out: Path = options.out
        self._on_gpu: bool = options.device == "cuda"
        self._engine = [f"--dtype={options.dtype}", *json.loads(options.engine_flags)]
        if self._on_gpu:
            # Engines share the GPU: a fixed size, where vLLM would take most of what is free.
            self._engine += [f"--kv-cache-memory-bytes={1 << 30}", "--gpu-memory-utilization=0.08"]
        if options.graphs:
            self._engine.append("--no-enforce-eager")
        self._env = _NO_FORK | {
            "TORCHDYNAMO_DISABLE": "0" if options.graphs else "1",
            # Engines start side by side; then one computes at a time.
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 4)),
        }

    def plain(self) -> HttpServer:
        return start_plain_vllm(self._model, self._out, *self._engine, name=PLAIN, env=self._env)

    def worker(self, name: str, cards: Path, *flags: str, **more: str) -> Process:
        flags = (*self._engine, *flags)
        return start_worker(name, self._model, cards, self._out, *flags, env=self._env | more)

    def frontend(self, name: str, cards: Path, *flags: str, **more: str) -> HttpServer:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self._on_gpu else {}
        return start_frontend(
            f"frontend-{name}", cards, self._out, *flags, env=self._env | hidden | more
        )


@contextlib.contextmanager
def fleet(options: argparse.Namespace) -> Iterator[Started]:
    """Start everything that the steps need, side by side; stop all of it in the end."""
    starter = Starter(options)
    cards, keeper_cards = options.out / "cards", options.out / "keeper-cards"
    processes: list[Process] = []
    with contextlib.ExitStack() as stack:

        def keep(process: _P) -> _P:
            processes.append(process)
            stack.callback(process.stop)
            return process

        plain = keep(starter.plain())
        workers = [keep(starter.worker(name, cards)) for name in WORKERS]
        ways = WAYS if "first_tokens" in options.steps else {"shm": WAYS["shm"]}
        frontends = {
            way: keep(starter.frontend(way, cards, *flags, **env))
            for way, (flags, env) in ways.items()
        }
        keeper = None
        if "encodings" in options.steps:
            log_all = {"VLLM_LOGGING_LEVEL": "DEBUG"}
            engine = keep(starter.worker(KEEPER, keeper_cards, *encodings.FLAGS, **log_all))
            keeper = keep(starter.frontend("encodings", keeper_cards)), engine.log
        plain.wait_for_status(200)
        for way, frontend in frontends.items():
            _wait_for_transports(frontend, dict.fromkeys(WORKERS, way), [*workers, frontend])
        if keeper:
            _wait_for_transports(keeper[0], {KEEPER: "shm"}, processes)
        # Side by side: an engine takes ten seconds to end.
        stack.callback(_ask_to_end, processes)
        yield Started(
            Client(plain.url),
            {way: Client(frontend.url) for way, frontend in frontends.items()},
            (Client(keeper[0].url), keeper[1]) if keeper else None,
            processes,
        )


def _ask_to_end(processes: list[Process]) -> None:
    for process in processes:
        process.signal(signal.SIGTERM)


def _wait_for_transports(
    frontend: HttpServer, wanted: dict[str, str], processes: list[Process]
) -> None:
    client = Client(frontend.url)
    deadline = time.monotonic() + START_TIMEOUT_S
    seen: dict[str, str | None] = {}
    while time.monotonic() < deadline:
        for process in processes:
            process.check_alive()
        with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
            seen = client.transports()
            if seen == wanted:
                return
        time.sleep(0.5)
    raise AssertionError(f"{frontend.name} reaches {seen}, not {wanted}:\n{frontend.tail()}")


def not_engines_with_cuda(processes: list[Process]) -> list[str]:
    """Processes of the fleet that opened CUDA's driver and are no engines."""
    found = set()
    for started in processes:
        for process in (psutil.Process(started.pid), *_children(started.pid)):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                opened = {
                    str(each.readlink()) for each in Path(f"/proc/{process.pid}/fd").iterdir()
                }
                command = " ".join(process.cmdline())
                if "/dev/nvidia-uvm" in opened and "EngineCore" not in command:
                    found.add(f"{started.name}: {command[:80]}")
    return sorted(found)


def _children(pid: int) -> list[psutil.Process]:
    return list(psutil.Process(pid).children(recursive=True))


class Deadline:
    """Raises TimeoutError, once, in whatever the program is doing then."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        signal.signal(signal.SIGALRM, self._raise)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def cancel(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _raise(self, *_: object) -> None:
        self.passed = True
        raise TimeoutError("the time of this part is over")


class Steps:
    """The steps that were asked for; one that fails leaves the others their turn."""

    def __init__(self, options: argparse.Namespace, deadline: "Deadline") -> None:
        self._options = options
        self._deadline = deadline
        self.failed: dict[str, str] = {}

    def run(self, name: str, step: Callable[[], _T]) -> _T | None:
        if name not in self._options.steps:
            return None
        try:
            if self._deadline.passed:
                raise TimeoutError("no time was left")
            return step()
        except Exception as error:  # noqa: BLE001 # it is in the result
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {error}"[:600]
            return None


def measure(options: argparse.Namespace) -> Fleet:
    """Start a fleet, and take all steps."""
    began, deadline = time.monotonic(), Deadline(options.seconds)
    steps = Steps(options, deadline)
    with fleet(options) as started:
        ready_s = round(time.monotonic() - began, 1)
        plain, frontends = started.plain, started.frontends

        def answers() -> Answers:
            return compare_answers(frontends["shm"], plain, options.questions)

        def first_tokens() -> dict[str, FirstToken]:
            contenders = {PLAIN: plain, **frontends}
            pids = {each.name.removeprefix("frontend-"): each.pid for each in started.processes}
            found = time_first_tokens(contenders, options.rounds, pids)
            for name, client in contenders.items():
                (options.out / f"{name}.metrics").write_text(client.metrics())
            return found

        def kept() -> Encodings:
            assert started.keeper is not None
            client, log = started.keeper
            return encodings.ask_again(client, plain, log)

        found = Fleet(
            dtype=options.dtype,
            ready_s=ready_s,
            answers=steps.run("answers", answers),
            first_tokens=steps.run("first_tokens", first_tokens) or {},
            encodings=steps.run("encodings", kept),
            not_engines_with_cuda=not_engines_with_cuda(started.processes),
            failed=steps.failed,
        )
        deadline.cancel()  # stopping has time of its own
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory for logs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=lambda value: value.split(","), required=True)
    parser.add_argument("--engine-flags", default="[]", help="more flags of vLLM, a JSON list")
    parser.add_argument("--graphs", action="store_true", help="compile, and use CUDA graphs")
    parser.add_argument("--seconds", type=float, default=400, help="for all steps")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sys.stdout.buffer.write(msgspec.json.encode(measure(options)) + b"\n")


if __name__ == "__main__":
    main()
