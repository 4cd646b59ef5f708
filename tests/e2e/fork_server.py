"""Starts processes that have imported vLLM already: ``python -m tests.e2e.fork_server FD``.

Importing vLLM takes ten seconds of CPU, and the tests start some two hundred processes that need
it: workers, their engines, frontends. This one imports it once and forks for each. What then runs
is what ``python -m MODULE``, ``python SCRIPT`` or ``python -c CODE`` runs, from its first line,
with arguments, environment, session, input and output of its own. An engine, which vLLM starts by
``spawn``, runs in a process that was forked before the one which starts it had done anything: see
:class:`_Spares`. Where several processes share the tests (pytest-xdist), these are forked, too, and
each has a socket of its own to the same server.

The other end of the socket FD is held by :mod:`tests.e2e.forked`, which also says what is started
the usual way all the same.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing.util
import operator
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.spawn import spawn_main
from pathlib import Path
from typing import Any, Final

import setproctitle

from backend_worker import supervise

WORKERS: Final = ("backend_worker", "tests.chaos.watched_worker")
PLAIN_VLLM: Final = "vllm.entrypoints.openai.api_server"
MESSAGE_BYTES: Final = 1 << 17
SPARE: Final = "a spare process of a test"
"""Title of a process that waits for its use."""
CLIENT: Final = 3
"""File descriptor of a process of tests: its socket to the server."""
STARTED_BY: Final = "MMROUTER_TESTS_FORK_SERVER"
"""Variable that such a process has: the pid of the server."""

_IMPORTED: Final = (
    "backend_worker.worker",
    "frontend.app",
    "tests.fakes.lettered_worker",
    PLAIN_VLLM,
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2_vl",
    "transformers.models.qwen2_vl.processing_qwen2_vl",
    # What these import when they start an engine or build an app. Nothing here may set levels of
    # logs, as what vLLM's server imports for SageMaker does.
    "compressed_tensors.quantization",
    "prometheus_fastapi_instrumentator",
    "pydantic.v1",
    "transformers.tokenization_mistral_common",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    # For processes that share the tests:
    "anthropic",
    "hypothesis.strategies",
    "kubernetes_asyncio.client",
    "playwright.sync_api",
)
_SERVED_ASIDE: Final = ("--preprocess-workers=", "--trust-request-chat-template")
_MEDIA: Final = "frontend.processing.child"
_HUNGRY: Final = "tests.unit.frontend.processing.hungry_child"
_BOUNDED: Final = ("frontend.bounded.structure_server", "frontend.bounded.template_server")
_FRONTENDS: Final = ("frontend", "tests.fuzz_http.watched_frontend")
_OF_TESTS: Final = (
    12  # servers for media, structures and templates: some are lost, as they should be
)
_PROCESSES: Final = "--processes="
_MEMBERS: Final = 4  # two, and one after each
_SPARES: Final = 3  # two engines with a coordinator; processes in which one computes
_RANKS: Final = "--data-parallel-size="  # of which each has an engine
_ABOVE: Final = 500  # file descriptors that nobody has
_PR_SET_PDEATHSIG: Final = 1

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Start:
    """What to run, in a process that was forked for it."""

    what: str
    """A module, a script or ``-c``."""
    arguments: list[str]
    environment: dict[str, str]
    within: int = 0
    """Of which process it shares the namespaces; 0 where they are the server's."""
    starts_others: bool = False
    """Whether it is a process of tests, which gets a socket to the server."""


def main() -> None:
    """Fork for whoever holds the other end of the socket, until it is closed."""
    setproctitle.getproctitle()  # finds where the title is, before the environment changes
    gc.disable()  # a fifth of the time is looking through what stays
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.enable()
    # Classes of models are looked at here, where an interpreter would be started for each.
    registry = importlib.import_module("vllm.model_executor.models.registry")
    vars(registry)["_run_in_subprocess"] = operator.call
    _replace_kernels_once()
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a thread would be missing in every child"
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # which an engine calls at its end, before it collects all
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the tests, which end it
    start = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if start is not None:
        _run(start)


def _replace_kernels_once() -> None:
    """Do what each engine does first: it looks through all that is imported for Triton kernels,
    which a CPU has none of.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    with warnings.catch_warnings(action="ignore"):  # of old names, which it looks at, too
        platform.register_triton_kernel_overrides()
    type(platform).register_triton_kernel_overrides = classmethod(lambda _: None)


class _Server:
    """Forks for all that hold the other end of a socket, until the first one is closed."""

    def __init__(self, first: socket.socket) -> None:
        self._first = first
        self._poll = select.poll()
        self._clients: dict[int, socket.socket] = {}
        self._children: dict[int, tuple[int, socket.socket]] = {}  # pid and client by pidfd
        self._add(first)

    def serve(self) -> Start | None:
        """Returns in each child, with what it is for; in the server itself, at the very end."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._tell_the_end(descriptor)
                elif (client := self._clients.get(descriptor)) is not None:
                    message, files, _, _ = socket.recv_fds(client, MESSAGE_BYTES, 3)
                    if message:
                        start = Start(**json.loads(message))
                        if self._fork(client, start, files):
                            return start
                    elif client is self._first:
                        return None
                    else:
                        self._remove(client)

    def _add(self, client: socket.socket) -> None:
        self._clients[client.fileno()] = client
        self._poll.register(client, select.POLLIN)

    def _remove(self, gone: socket.socket) -> None:
        """And with it what was forked for it."""
        for pid, client in self._children.values():
            if client is gone:
                os.kill(pid, signal.SIGKILL)
        self._poll.unregister(gone)
        del self._clients[gone.fileno()]
        gone.close()

    def _fork(self, client: socket.socket, start: Start, files: Sequence[int]) -> bool:
        """Whether this is the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            _become_a_session(theirs.detach() if start.starts_others else None, *files)
            return True
        for each in files:
            os.close(each)
        theirs.close()
        if start.starts_others:
            self._add(ours)
        else:
            ours.close()
        self._children[pidfd := os.pidfd_open(pid)] = pid, client
        self._poll.register(pidfd, select.POLLIN)
        _tell(client, pid=pid)
        return False

    def _tell_the_end(self, pidfd: int) -> None:
        pid, client = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _tell(client, pid=pid, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _tell(client: socket.socket, **answer: int) -> None:
    with contextlib.suppress(OSError):  # it is gone, or is just going
        client.send(json.dumps(answer).encode())


def _become_a_session(
    client: int | None, output: int, given: int | None = None, errors: int | None = None
) -> None:
    """As :func:`tests.e2e.processes.like_a_user` does for a process that is started."""
    _stop_with_the_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY) if given is None else given, 0)
    os.dup2(output, 1)
    os.dup2(output if errors is None else errors, 2)
    if client is not None:
        os.dup2(client, CLIENT)
    os.closerange(3 if client is None else CLIENT + 1, _most_files())


def _enter(pid: int) -> None:
    """As ``nsenter`` does."""
    here = Path.cwd()
    for name in ("net", "uts", "ipc", "mnt"):
        with Path(f"/proc/{pid}/ns/{name}").open("rb") as namespace:
            if _libc.setns(namespace.fileno(), 0):
                raise OSError(f"no {name} namespace of {pid}")
    os.chdir(here)


def _run(start: Start) -> None:
    if start.within:
        _enter(start.within)
    os.environ.clear()
    os.environ.update(start.environment)
    hub = importlib.import_module("huggingface_hub.constants")
    vars(hub)["HF_HUB_OFFLINE"] = "HF_HUB_OFFLINE" in os.environ  # as it reads it when imported
    if start.starts_others:
        os.environ[STARTED_BY] = str(os.getppid())
    spares = _Spares(_spares_for(start.arguments))
    if start.what in WORKERS:
        _after_supervise(spares.prepare)
    elif start.what == PLAIN_VLLM:
        spares.prepare()
    elif start.starts_others:
        _Spares(_OF_TESTS).prepare_modules(_MEDIA, _HUNGRY, *_BOUNDED)
    elif any(each.startswith(_PROCESSES) for each in start.arguments):
        _Spares(_MEMBERS).prepare_modules("frontend")
    elif start.what in _FRONTENDS:
        more = sum(each.startswith(_SERVED_ASIDE) for each in start.arguments)
        _Spares(1 + more).prepare_modules(_MEDIA, *_BOUNDED)
    sys.argv = [start.what, *start.arguments]
    if is_script := start.what.endswith(".py"):
        sys.path.insert(0, str(Path(start.what).parent))
    words = sys.argv if is_script or start.what == "-c" else ["-m", *sys.argv]
    setproctitle.setproctitle(" ".join([sys.executable, *words]))
    with _quick_end():
        if start.what == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        elif is_script:
            runpy.run_path(start.what, run_name="__main__")
        else:
            runpy.run_module(start.what, run_name="__main__", alter_sys=True)


def _spares_for(arguments: Sequence[str]) -> int:
    ranks = [int(each.removeprefix(_RANKS)) for each in arguments if each.startswith(_RANKS)]
    return max(_SPARES, 1 + max(ranks, default=1))  # and a coordinator


@contextlib.contextmanager
def _quick_end() -> Iterator[None]:
    """End as an interpreter does, but leave objects alone: collecting vLLM's takes seconds."""
    code: object = None
    try:
        yield
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _after_supervise(then: Callable[[], None]) -> None:
    """Call something first of all in the worker, which is a child of what ``python -m`` starts."""
    usual = supervise.supervise

    def supervised() -> None:
        usual()
        then()

    supervise.supervise = supervised


@dataclass
class _Spares:
    """Children of a process that have done nothing yet, for use where it would start an
    interpreter. When they run out, it does.
    """

    number: int = _SPARES
    _free: list[tuple[int, socket.socket]] = field(default_factory=list)

    def prepare(self, spare: bool = False) -> None:
        """Fork those that :mod:`multiprocessing` takes.

        Args:
            spare: whether this process is one itself: then there are none for those after it.
        """
        self._fork(spares=not spare)
        usual = multiprocessing.util.spawnv_passfds

        def spawnv_passfds(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
            if "--multiprocessing-fork" not in args or not self._free:
                return usual(path, args, passfds)
            return self._use(passfds, os.environ, args=[os.fsdecode(each) for each in args])

        multiprocessing.util.spawnv_passfds = spawnv_passfds

    def prepare_modules(self, *modules: str) -> None:
        """Fork those that are started as ``python -m MODULE``, or by such a module for one."""
        self._fork(spares=False)
        use, free = self._use, self._free

        class Popen(subprocess.Popen[Any]):
            def __new__(cls, *args: Any, **options: Any) -> Any:
                command = args[0] if args else options["args"]
                if not (free and isinstance(command, list | tuple) and {*modules} & {*command}):
                    return super().__new__(cls)
                ends_with = getattr(options.get("preexec_fn"), "args", [0])[0]  # end_with_parent's
                words = command[command.index("-m") + 1 :]
                environment = options.get("env") or os.environ
                # Input and output too, which the parent may have changed since it forked.
                files = [0, 1, 2, *options["pass_fds"]]
                return _Spared(use(files, environment, module=words, ends_with=ends_with))

        vars(subprocess)["Popen"] = Popen

    def _fork(self, spares: bool) -> None:
        for _ in range(self.number):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                ours.close()
                for _, other in self._free:
                    other.close()
                _wait_for_use(theirs, spares)
            theirs.close()
            self._free.append((pid, ours))

    def _use(self, files: Iterable[int], environment: Mapping[str, str], **use: Any) -> int:
        """Tell the next one what it is for; its pid."""
        pid, spare = self._free.pop(0)
        descriptors = sorted(set(files))
        use |= {"descriptors": descriptors, "environment": dict(environment)}
        with spare:
            socket.send_fds(spare, [json.dumps(use).encode()], descriptors)
        return pid


class _Spared:
    """A spare in use, with what the product and asyncio use of :class:`subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # asyncio has its status
                if (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
                    self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _wait_for_use(control: socket.socket, spares: bool) -> None:
    """Be a spare; does not return."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    _stop_with_the_parent(signal.SIGKILL)
    setproctitle.setproctitle(SPARE)
    message, received, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 64)
    if not message:
        os._exit(0)
    use: dict[str, Any] = json.loads(message)
    _stop_with_the_parent(use.get("ends_with", 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_descriptors(received, use["descriptors"])
    os.environ.clear()
    os.environ.update(use["environment"])
    if "module" in use:
        sys.argv = use["module"]
        setproctitle.setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
        with _quick_end():
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.argv = ["-c", use["args"][-1]]
    named = re.search(r"tracker_fd=(\d+), pipe_handle=(\d+)", " ".join(use["args"]))
    assert named is not None, use["args"]
    setproctitle.setproctitle(" ".join(use["args"]))
    if spares:
        _Spares().prepare(spare=True)
    with _quick_end():
        spawn_main(tracker_fd=int(named[1]), pipe_handle=int(named[2]))


def _take_descriptors(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Give received files the numbers that they have in the parent, and close all others."""
    assert len(received) == len(wanted)
    aside = [os.dup2(each, _ABOVE + number) for number, each in enumerate(received)]
    os.closerange(3, _ABOVE)
    for descriptor, number in zip(aside, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _stop_with_the_parent(number: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def _most_files() -> int:
    return os.sysconf("SC_OPEN_MAX")


if __name__ == "__main__":
    main()
