"""One process for media, as the thread that talks to it sees it.

Every wait for it has an end. If it does not answer in time it is killed and its connection shut
down, so that whoever reads from it or writes to it sees it gone.
"""

import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

from common.python_command import python_command
from frontend.media_processes import Deadline, Ready, StartUp
from frontend.processing.errors import ProcessHungError, ProcessLostError

logger = logging.getLogger(__name__)

COMMAND: Final = python_command("frontend.processing.child")
"""Starts it, with the number of its end of a socket pair."""

START_S: Final = 120.0
"""Seconds within which it is ready."""

LOST: Final = (EOFError, OSError)
"""How a connection says that the process at its other end is gone."""

_STOP_S: Final = 5.0


class ChildProcess:
    """One process, as the thread that talks to it sees it."""

    def __init__(self, order: StartUp) -> None:
        """Start it; it isn't ready yet. Raises ProcessLostError if that can't be done."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._popen = subprocess.Popen(
                    [*COMMAND, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                self._socket.close()
                raise ProcessLostError(f"a process for media can't be started: {error}") from error
        self.connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        self._order = order

    @property
    def pid(self) -> int:
        """For the log."""
        return self._popen.pid

    def wait_until_ready(self) -> None:
        """Raises ProcessLostError if it ends instead, or takes too long."""
        deadline = Deadline(START_S, self.kill)
        try:
            with deadline:
                self.connection.send(self._order)
                answer = self.connection.recv()
                assert isinstance(answer, Ready), answer
        except LOST as error:
            late = f" within {START_S:g} s" if deadline.missed else ""
            raise ProcessLostError(f"a process for media did not start{late}") from error

    @contextlib.contextmanager
    def in_time(self, seconds: float) -> Iterator[Deadline]:
        """Whatever is said to it inside of this ends in time: it is killed otherwise.

        Raises ProcessHungError if that was necessary.
        """
        deadline = Deadline(seconds, self.kill)
        try:
            with deadline:
                yield deadline
        except LOST as error:
            if not deadline.missed:
                raise
            raise ProcessHungError("did not answer in time") from error

    def kill(self) -> None:
        """End it at once, also if it is stopped; whoever talks to it sees it gone."""
        self._popen.kill()
        # For the case that the kernel can't end it now: it may wait for a disk.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End it; whoever talks to it sees it gone. May be called twice."""
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            try:
                self._popen.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                logger.error("process %d can't be killed: leaving it behind", self.pid)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, once nobody uses it any more. May be called twice."""
        self.connection.close()
        self._socket.close()
