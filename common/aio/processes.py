"""Start a child process that ends with this one, stop on signals, freeze what a process loaded."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_STDERR: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)


def python_command(module: str) -> list[str]:
    """Return a command that runs a module. It searches the current directory only if this process
    does, as ``python -m`` does and an installed command does not."""
    try:
        here = Path.cwd()
        looks_here = any(Path(path).absolute() == here for path in sys.path)
    except FileNotFoundError:  # the directory was removed
        looks_here = False
    return [sys.executable, *([] if looks_here else ["-P"]), "-m", module]


def end_with_parent(number: signal.Signals | None) -> None:
    """In a child: request a signal when the parent thread ends; None cancels that."""
    _libc.prctl(_PR_SET_PDEATHSIG, number or 0, 0, 0, 0)


def freeze_heap() -> None:
    """Exempt all present objects from garbage collection, and have it look at all later ones.

    Python collects old objects once a quarter as many came as its last full collection left. After
    one before the freeze, that takes 200,000 objects that stay: garbage did until memory was full.
    A second one finds few, so the next comes soon, and takes milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


class SpawnedProcess:
    """A child process on a socket pair. Our end reports EOF once the child ends."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        kind: socket.SocketKind = socket.SOCK_STREAM,
        *,
        descriptors: Sequence[int] = (),
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        only_stderr: bool = False,
    ) -> None:
        """Start the child. It need not be ready yet.

        Args:
            command: returns the command line; gets the descriptor of the child's end.
            descriptors: further descriptors that it inherits.
            only_stderr: stdin is empty, and stdout goes to stderr.

        Raises OSError: this host has no room for another process, or no such program.
        """
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, kind)
        with contextlib.ExitStack() as opened, theirs:
            opened.enter_context(self.socket)
            self._popen = subprocess.Popen(
                command(theirs.fileno()),
                pass_fds=[theirs.fileno(), *descriptors],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL if only_stderr else None,
                stdout=_STDERR if only_stderr else None,
            )
            opened.pop_all()
        self.pid = self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        """Kill the process at once. Harmless after its end."""
        self._popen.kill()

    def reap(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit status, or None on time-out. A killed process may stay
        in the kernel for longer, for example waiting for a disk."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(timeout_s)
        return None

    def end(self, timeout_s: float) -> int | None:
        """Close the connection, then kill and reap the process. The connection must be unused."""
        self.socket.close()
        self.kill()
        return self.reap(timeout_s)


class ForkedProcess:
    """As :class:`SpawnedProcess`, but forked from this one, with all that it has imported."""

    def __init__(
        self,
        run: Callable[[socket.socket], None],
        kind: socket.SocketKind,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Have the child call ``run`` with its end; it ends with that. It keeps ``descriptors``,
        and has others of this process refer to nothing: libraries close theirs in its own children,
        as libuv does, and would close what has got the number. Raises OSError: this host has no
        room for it."""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, kind)
        with contextlib.ExitStack() as opened, theirs:
            opened.enter_context(self.socket)
            self.pid = os.fork()
            if not self.pid:
                _run_and_exit(run, theirs, descriptors)
            opened.pop_all()
        self._pidfd: int | None = os.pidfd_open(self.pid)
        self._status: int | None = None

    @property
    def alive(self) -> bool:
        return self.reap(0) is None

    def reap(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit status, or None on time-out."""
        if self._pidfd is not None and select.select([self._pidfd], [], [], timeout_s)[0]:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
            self._pidfd = None
        return self._status

    def end(self, timeout_s: float) -> int | None:
        """Close the connection, then kill and reap the process. The connection must be unused."""
        self.socket.close()
        if self._pidfd is not None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return self.reap(timeout_s)


def _run_and_exit(
    run: Callable[[socket.socket], None], theirs: socket.socket, descriptors: Sequence[int]
) -> NoReturn:
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        kept = {*range(_STDERR + 1), theirs.fileno(), *descriptors}
        for each in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - kept:
            with contextlib.suppress(OSError):  # of the listing itself
                os.dup2(nothing, each, inheritable=False)
        run(theirs)
        status = 0
    finally:  # nothing above may run in this process
        if status:
            traceback.print_exc()
        os._exit(status)


class StopSignals:
    """Listen for SIGTERM, SIGINT and SIGHUP on the running event loop, from construction on."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._at_once = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.terminate)
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        self._has_terminal = os.isatty(0)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # by nohup
            loop.add_signal_handler(signal.SIGHUP, self.hang_up)

    def terminate(self) -> None:
        if self._asked.is_set():
            self._at_once.set()
        self._asked.set()

    def interrupt(self) -> None:
        self._asked.set()
        self._at_once.set()

    def hang_up(self) -> None:
        """End like SIGTERM if a terminal has gone; otherwise go on, since a reload was meant."""
        if self._has_terminal:
            self._asked.set()
        else:
            logger.warning(
                "SIGHUP changes nothing: a frontend follows its key files, and TLS files with "
                "--enable-ssl-refresh, by itself; other settings need a restart (SIGTERM drains)"
            )

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    async def asked(self) -> None:
        """Wait for either signal."""
        await self._asked.wait()

    async def at_once(self, timeout: float | None = None) -> bool:
        """Wait until the process should end at once; return False on time-out."""
        try:
            async with asyncio.timeout(timeout):
                await self._at_once.wait()
        except TimeoutError:
            return False
        return True
