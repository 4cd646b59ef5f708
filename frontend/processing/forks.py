"""Where processes for media come from: a fork server, started again if it dies.

For any number of threads. Every wait for it has an end.
"""

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import Final

from common.aio.processes import SpawnedProcess, python_command
from frontend.media_processes import FORK
from frontend.processing.errors import ProcessLostError

COMMAND: Final = python_command("frontend.media_processes.fork_server")
"""Starts the fork server, with the module that children run and its end of a socket pair."""

MODULE: Final = "frontend.processing.child"
"""What processes run: its ``main`` gets the descriptor of a process's end."""

START_S: Final = 120.0
"""Seconds within which it has imported what children need, and forked."""

_STOP_S: Final = 2.0


@dataclass(frozen=True)
class Forked:
    """A process that was forked.

    Attributes:
        pidfd: belongs to whoever has this.
    """

    pid: int
    pidfd: int


class Forks:
    """Forks processes for media. They outlive it, and end with this process."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._changing = threading.Lock()
        self._server: _Server | None = None
        self._closed = False

    def fork(self, theirs: socket.socket) -> Forked:
        """Fork one. The first takes seconds: not on the event loop.

        Args:
            theirs: its end of a connection.

        Raises:
            ProcessLostError: it can't be had, or not in time.
        """
        if not self._turn.acquire(timeout=START_S):
            raise ProcessLostError(_late())
        try:
            return self._running().fork(theirs)
        except ProcessLostError:
            self._forget()  # what did not answer now may be late to answer somebody else
            raise
        finally:
            self._turn.release()

    def refuse(self) -> None:
        """Fork no more; whoever waits for a fork gets an error."""
        with self._changing:
            self._closed = True
            if self._server is not None:
                self._server.leave()

    def close(self) -> None:
        """After :meth:`refuse`, and when the processes have ended, which the server reaps."""
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
                self._server = _Server()
            return self._server

    def _forget(self) -> None:
        """Only in one's turn: nobody else uses it then."""
        with self._changing:
            if self._server is not None:
                self._server.process.end(_STOP_S)
            self._server = None


class _Server:
    """One run of it."""

    def __init__(self) -> None:
        try:
            self.process = SpawnedProcess(
                lambda end: [*COMMAND, MODULE, str(end)], socket.SOCK_SEQPACKET
            )
        except OSError as error:
            raise ProcessLostError(f"a process for media can't be started: {error}") from error
        self.process.socket.settimeout(START_S)

    def fork(self, theirs: socket.socket) -> Forked:
        try:
            socket.send_fds(self.process.socket, [FORK], [theirs.fileno()])
            answer, pidfds, _, _ = socket.recv_fds(self.process.socket, 20, 1)
        except TimeoutError as error:
            raise ProcessLostError(_late()) from error
        except OSError as error:
            raise ProcessLostError(f"a process for media did not start: {error}") from error
        if not answer:
            raise ProcessLostError("a process for media did not start: its fork server ended")
        return Forked(int(answer), pidfds[0])

    def leave(self) -> None:
        """Whoever waits for it sees it gone; it goes with its last child."""
        with contextlib.suppress(OSError):
            self.process.socket.shutdown(socket.SHUT_RDWR)


def _late() -> str:
    return f"a process for media did not start within {START_S:g} s"
