"""Real processes for end-to-end tests: workers, frontends and a plain vLLM server."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from common.request_plane.card import WorkerCard
from tests.e2e.forked import Forked, ForkServer
from tests.ports import free_port

START_TIMEOUT_S = 240.0

ONE_PROCESS = "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""As on one GPU: the engine computes in its own process. vLLM gives "uni" a second one on CPUs."""

ENGINE_FLAGS = (
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=4096",
    "--block-size=32",
    "--served-model-name=demo",
    "--enable-mm-embeds",
    ONE_PROCESS,
    "--num-gpu-blocks-override=2048",  # or it takes a whole GB
)
SEPARATE_EXECUTOR = "--distributed-executor-backend=mp"
"""As on several GPUs: the engine computes in another process."""

SERVER_FLAGS = (
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--trust-request-mm-kwargs",
    '--limit-mm-per-prompt={"image": 4}',
)


_PRELOADED = os.environ.get("LD_PRELOAD", "")


def environment() -> dict[str, str]:
    """What a vLLM process needs on a machine without a GPU or a network."""
    return os.environ | {
        # vLLM's configuration sets it, also in a process of tests, where nothing could be forked
        # from then on.
        "LD_PRELOAD": _PRELOADED,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Once it is set, ranks of data parallel may share a NUMA node, which 0.33 else refuses; 1
        # would have nodes simulated, which engines don't start with where threads aren't bound.
        "VLLM_CPU_SIM_MULTI_NUMA": "0",
        "OMP_NUM_THREADS": "1",
        # Without a C++ compiler log-probabilities would kill the engine; with one, the
        # first of them takes 18 s.
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def like_a_user() -> None:
    """In the child, before it runs. A test run that is killed must not leave engines
    behind; one that was started in the background ignores Ctrl-C, which a user's shell
    doesn't, and a shell script can't undo.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


FORKS = ForkServer(environment(), like_a_user, shared=True)
_FORKS_OF_OTHERS: list[ForkServer] = []


@contextlib.contextmanager
def forks_with(extra: Mapping[str, str]) -> Iterator[None]:
    """Fork processes that have variables which are read at their start, ``LD_PRELOAD`` for one.
    At the end all of them are killed.
    """
    server = ForkServer(environment() | dict(extra), like_a_user)
    _FORKS_OF_OTHERS.append(server)
    try:
        yield
    finally:
        _FORKS_OF_OTHERS.remove(server)
        server.close()


def start_process(
    command: Sequence[str], env: Mapping[str, str], output: int, given: int | None = None
) -> Forked | subprocess.Popen[bytes]:
    """Forked where that makes no difference but to the time that it takes."""
    files = (output,) if given is None else (output, given)
    for forks in (FORKS, *_FORKS_OF_OTHERS):
        if forked := forks.fork(command, env, *files):
            return forked
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if given is None else given,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
        preexec_fn=like_a_user,
    )


def run_python(*arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run Python until it ends; its output has its errors, too."""
    with tempfile.TemporaryFile("w+") as output:
        process = start_process([sys.executable, *arguments], environment(), output.fileno())
        try:
            status = process.wait(timeout_s)
        finally:
            process.send_signal(signal.SIGKILL)
        output.seek(0)
        return subprocess.CompletedProcess(arguments, status, output.read())


class Process:
    """A process in its own group, with its output in a log file."""

    def __init__(self, name: str, command: Sequence[str], log: Path, **extra_env: str) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = start_process(command, environment() | extra_env, output.fileno())

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def check_alive(self) -> None:
        """Fail with the end of the log if the process has ended."""
        if not self.is_alive():
            raise AssertionError(
                f"{self.name} ended with status {self._process.returncode}:\n{self.tail()}"
            )

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float = 60.0) -> int:
        return self._process.wait(timeout)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever is left of the group."""
        if self.is_alive():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


def start_worker(
    name: str,
    model: Path,
    discovery: Path | str,
    logs: Path,
    *flags: str,
    within: Sequence[str] = (),
    module: Sequence[str] = ("backend_worker",),
    env: Mapping[str, str] = {},
) -> Process:
    """A worker named ``name``.

    Args:
        discovery: where cards are kept: a directory or a URL.
        module: what runs it, with arguments that come before the worker's.
        within: a command that runs it, ``unshare --mount`` for example.
    """
    command = [
        *within,
        sys.executable, "-m", *module,
        f"--model={model}", f"--worker-id={name}", discovery_flag(discovery),
        *ENGINE_FLAGS, SERVER_FLAGS[-1], *flags,
    ]  # fmt: skip
    return Process(name, command, logs / f"{name}.log", **env)


def discovery_flag(place: Path | str) -> str:
    if isinstance(place, Path):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return f"--discovery={place}"


def card_path(discovery: Path, name: str) -> Path:
    """The file of a worker's card; one that was killed may have left its own."""
    return max(discovery.glob(f"{name}.*.json"), key=lambda path: path.stat().st_mtime_ns)


def card_of(discovery: Path, name: str) -> WorkerCard:
    """What a worker says of itself."""
    return WorkerCard.from_json(card_path(discovery, name).read_bytes())


def worker_pid(discovery: Path, name: str) -> int:
    """Of the process that frontends talk to, which is a child of the one that was started."""
    return card_of(discovery, name).host.pid


def engine_pid(discovery: Path, name: str) -> int:
    """Of the process of a worker that computes."""
    children = psutil.Process(worker_pid(discovery, name)).children(recursive=True)
    (engine,) = (child for child in children if "EngineCore" in " ".join(child.cmdline()))
    return engine.pid


@contextlib.contextmanager
def paused(*pids: int) -> Iterator[None]:
    """Processes stand still meanwhile, so that what they work on can't be done too early,
    however fast they are and however slow the test is."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


class HttpServer(Process):
    """A process that serves OpenAI's API on ``url``."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, port: int, **extra_env: str
    ) -> None:
        super().__init__(name, command, log, **extra_env)
        self.url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        """Whether it has loaded its model; operators are answered before."""
        return httpx.get(self.url + "/health", timeout=5).status_code == 200

    def wait_for_status(self, status: int, path: str = "/health") -> None:
        """Wait until a path answers with a status."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                if httpx.get(self.url + path, timeout=5).status_code == status:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"{self.name} did not answer {status} on {path}:\n{self.tail()}")


def start_frontend(
    name: str,
    discovery: Path | str,
    logs: Path,
    *flags: str,
    module: Sequence[str] = ("frontend",),
    port: int | None = None,
    env: Mapping[str, str] = {},
    python: str | None = None,
    tools: bool = True,
) -> HttpServer:
    """A frontend over the workers of a place.

    Args:
        discovery: where cards are kept: a directory or a URL.
        module: what runs it, with arguments that come before the frontend's.
        port: where it listens; a free port unless given.
        python: interpreter of the environment that it runs in; this one's unless given.
        tools: whether clients may send tools.
    """
    port = port or free_port()
    command = [
        python or sys.executable, "-m", *module,
        discovery_flag(discovery), f"--port={port}", "--mm-arena-gb=0.1",
        "--media-allow-private",  # the tests' pictures come from loopback
        *(SERVER_FLAGS[:-1] if tools else ()), *flags,
    ]  # fmt: skip
    return HttpServer(name, command, logs / f"{name}.log", port, **env)


def start_plain_vllm(
    model: Path,
    logs: Path,
    *flags: str,
    name: str = "plain-vllm",
    env: Mapping[str, str] = {},
) -> HttpServer:
    """vLLM's own server, the answer to compare with."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}",
        "--host=127.0.0.1", f"--port={port}", "--enable-prompt-tokens-details",
        "--prefix-caching-hash-algo=sha256_cbor",
        *ENGINE_FLAGS, *SERVER_FLAGS, *flags,
    ]  # fmt: skip
    return HttpServer(name, command, logs / f"{name}.log", port, **env)


def shared_memory_of(*pids: int) -> set[str]:
    """Names of what processes have, or left, in shared memory. Others may remove what they left."""
    names = {path.name for path in Path("/dev/shm").glob("mmrouter-arena-*")}
    return {name for name in names if int(name.split("-")[2]) in pids}
