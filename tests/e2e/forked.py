"""What :mod:`tests.e2e.fork_server` forks, with the methods of :class:`subprocess.Popen`."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tests.e2e.fork_server import CLIENT, MESSAGE_BYTES, PLAIN_VLLM, STARTED_BY, WORKERS, Start

ROOT: Final = Path(__file__).parents[2]
_READ_AT_START: Final = ("PYTHON", "LD_PRELOAD", "OMP_", "MALLOC_", "PROMETHEUS_", "VLLM_LOGGING_")
_MODULES: Final = (
    *WORKERS,
    "frontend",
    PLAIN_VLLM,
    "setup.",
    "tests.e2e.clients.programs.bench_serve",
    "tests.fakes.",
    "tests.benchmarks.",
    "tests.families.",
    "tests.fuzz_http.",
    "tests.simgpu.",
    "tests.unit.",
)


def _start_of(command: Sequence[str], environment: Mapping[str, str]) -> Start | None:
    if sys.executable not in command:
        return None
    at = list(command).index(sys.executable)
    match command[:at]:
        case []:
            within = 0
        case ["nsenter", target, *_]:
            within = int(target.removeprefix("--target="))
        case _:
            return None
    match command[at + 1 :]:
        case ["-m", module, *arguments] if module.startswith(_MODULES):
            return Start(module, arguments, dict(environment), within)
        case ["-c", *arguments]:
            return Start("-c", arguments, dict(environment), within)
        case [script, *arguments] if script.endswith(".py"):
            return Start(script, arguments, dict(environment), within)
    return None


class Forked:
    """A process that was forked. It is nobody's child here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: Future[int] = Future()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self.ended.result(timeout)
        except NotYet:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None

    def send_signal(self, number: int) -> None:
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):  # it has ended, and that isn't known yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """Forks processes of one environment; it starts at the first fork."""

    def __init__(
        self,
        environment: Mapping[str, str],
        like_a_user: Callable[[], None],
        shared: bool = False,
    ) -> None:
        """
        Args:
            shared: whether to use the server that has forked this process, if one has.
        """
        self._shared = shared and STARTED_BY in os.environ
        self._environment = dict(environment)
        self._like_a_user = like_a_user
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pids: queue.Queue[int] = queue.Queue()
        self._living: dict[int, Forked] = {}

    @property
    def pid(self) -> int | None:
        """Of the server, which runs from its first fork until this process ends."""
        if self._shared:
            return int(os.environ[STARTED_BY])
        return None if self._server is None else self._server.pid

    def close(self) -> None:
        """End the server, and with it all that it has forked."""
        with self._lock:
            if self._socket is not None and self._server is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
                self._server.wait(30)

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], *files: int
    ) -> Forked | None:
        """Run what a command would run, with a file for its output and perhaps one for its input.
        None if it is not Python with code, a script, or a module of ours or vLLM's, here or on a
        :class:`tests.e2e.hosts.Host`, or if an environment variable differs that is read while
        Python starts or vLLM is imported.
        """
        start = _start_of(command, environment)
        if start is None or not self._is_environment(environment):
            return None
        return self._fork(start, *files)

    def fork_tests(self, code: str, output: int, given: int) -> Forked:
        """Run code of a process that runs tests, in the environment of this process."""
        start = Start("-c", [code], dict(os.environ), starts_others=True)
        return self._fork(start, output, given, 2)

    def _fork(self, start: Start, *files: int) -> Forked:
        with self._lock:
            if self._socket is None:
                self._socket = self._start()
            socket.send_fds(self._socket, [json.dumps(asdict(start)).encode()], files)
            pid = self._pids.get()
            if not pid:
                raise RuntimeError("the fork server ended")
            return self._living[pid]

    def _is_environment(self, environment: Mapping[str, str]) -> bool:
        names = environment.keys() | self._environment.keys()
        changed = (n for n in names if environment.get(n) != self._environment.get(n))
        return not any(n.startswith(_READ_AT_START) for n in changed)

    def _start(self) -> socket.socket:
        if self._shared:
            ours = socket.socket(fileno=CLIENT)
            self._read_in_a_thread(ours)
            return ours
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                preexec_fn=self._like_a_user,
            )
        self._read_in_a_thread(ours)
        return ours

    def _read_in_a_thread(self, answers: socket.socket) -> None:
        threading.Thread(target=self._read, args=[answers], daemon=True, name="forks").start()

    def _read(self, answers: socket.socket) -> None:
        while message := answers.recv(MESSAGE_BYTES):
            answer: dict[str, int] = json.loads(message)
            pid = answer["pid"]
            if "status" in answer:
                self._living.pop(pid).ended.set_result(answer["status"])
            else:
                self._living[pid] = Forked(pid)
                self._pids.put(pid)
        self._pids.put(0)
        answers.close()
        for forked in self._living.values():
            forked.ended.set_result(-signal.SIGKILL)  # as its end does to them
