"""Supply of processes that decode or process media: a fork server, restarted if it dies.

Thread-safe. Every wait has a deadline.
"""

import contextlib
import errno
import os
import socket
import threading
from typing import Final, Protocol

from common.aio.fork_server import FORK
from common.aio.processes import SpawnedProcess, python_command
from common.errors import MmRouterError

COMMAND: Final = python_command("common.aio.fork_server")
"""Starts the fork server; its arguments are the children's module and its end of a socket pair."""

START_S: Final = 120.0
"""Time-out in seconds for its imports and for each fork."""

_STOP_S: Final = 2.0


class ProcessLostError(MmRouterError):
    """A process for media ended by itself."""


class ServerProcess(Protocol):
    """A fork server's process, with the other end of its socket."""

    socket: socket.socket

    @property
    def alive(self) -> bool: ...

    def reap(self, timeout_s: float) -> int | None: ...

    def end(self, timeout_s: float) -> int | None: ...


class Forks:
    """Forks processes. They outlive this object, and end with this process."""

    def __init__(self, module: str, first: ServerProcess | None = None) -> None:
        """
        Args:
            module: of the processes; its ``main`` gets the descriptor of a process's end.
            first: a running fork server of it. Otherwise one starts at the first fork: seconds.
        """
        self._module = module
        self._turn = threading.Lock()
        self._changing = threading.Lock()
        self._server: _Server | None = None if first is None else _Server(first)
        self._closed = False

    def fork(self, theirs: socket.socket) -> tuple[int, int]:
        """Fork a process with its end of a connection; return its pid, and a pidfd that the caller
        owns. The first takes seconds: not on the event loop. Raises ProcessLostError on failure or
        time-out.
        """
        if not self._turn.acquire(timeout=START_S):
            raise ProcessLostError(_late())
        try:
            return self._running().fork(theirs)
        except ProcessLostError:
            self._forget()  # a late answer would go to the next caller
            raise
        finally:
            self._turn.release()

    def refuse(self) -> None:
        """Stop forking; callers that wait for a fork get an error."""
        with self._changing:
            self._closed = True
            if self._server is not None:
                self._server.leave()

    def rest(self) -> None:
        """End an idle server. Another starts at the next fork, if there is one."""
        with self._turn:
            self._forget()

    def close(self) -> None:
        """End the server, after :meth:`refuse` and the end of the processes, which it reaps."""
        with self._turn:
            if self._server is not None:
                self._server.process.reap(_STOP_S)
            self._forget()

    def _running(self) -> "_Server":
        if self._server is not None and not self._server.process.alive:
            self._forget()
        with self._changing:
            if self._closed:
                raise ProcessLostError("the frontend is shutting down")
            if self._server is None:
                self._server = _Server(_started(self._module))
            return self._server

    def _forget(self) -> None:
        """Drop the server; the caller must hold the turn."""
        with self._changing:
            if self._server is not None:
                self._server.process.end(_STOP_S)
            self._server = None


class _Server:
    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        process.socket.settimeout(START_S)

    def fork(self, theirs: socket.socket) -> tuple[int, int]:
        try:
            socket.send_fds(self.process.socket, [FORK], [theirs.fileno()])
            answer, pidfds, _, _ = socket.recv_fds(self.process.socket, 20, 1)
        except TimeoutError as error:
            raise ProcessLostError(_late()) from error
        except OSError as error:
            raise ProcessLostError(f"a process for media did not start: {error}") from error
        if answer and not pidfds:
            lacking = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise ProcessLostError("a process for media can't be watched") from lacking
        if not answer:
            raise ProcessLostError("a process for media did not start: its fork server ended")
        return int(answer), pidfds[0]

    def leave(self) -> None:
        """Unblock its callers. It ends with its last child."""
        with contextlib.suppress(OSError):
            self.process.socket.shutdown(socket.SHUT_RDWR)


def _started(module: str) -> SpawnedProcess:
    try:
        return SpawnedProcess(lambda end: [*COMMAND, module, str(end)], socket.SOCK_SEQPACKET)
    except OSError as error:
        raise ProcessLostError(f"a process for media can't be started: {error}") from error


def _late() -> str:
    return f"a process for media did not start within {START_S:g} s"
