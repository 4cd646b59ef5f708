"""One process for media, from the view of the thread that talks to it.

Every wait has a deadline. A process that misses it is killed and its connection shut down, so that
blocked readers and writers return.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Self

from common.errors import MmRouterError
from frontend.bounded.fork_supply import START_S, Forks, ProcessLostError

logger = logging.getLogger(__name__)

LOST: Final = (EOFError, OSError)
"""Errors of a connection whose other end is gone."""

_STOP_S: Final = 5.0


class ProcessHungError(MmRouterError):
    """A process missed its deadline and was killed."""


@dataclass(frozen=True)
class Ready:
    """First message of a process: it has read its order."""


class Deadline:
    """Calls ``give_up`` in a thread if the enclosed block takes too long, and sets ``missed``."""

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        self._at = time.monotonic() + seconds
        self._give_up = give_up
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="media-deadline", daemon=True)
        self.missed = False

    def extend(self, seconds: float) -> None:
        self._at += seconds

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()  # no give_up after this

    def _watch(self) -> None:
        while (left := self._at - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        self.missed = True
        self._give_up()


class ChildProcess:
    def __init__(self, order: object, forks: Forks) -> None:
        """Start the process; it isn't ready yet. ``order`` is its first message. Raises
        ProcessLostError.
        """
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self.connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
                self.pid, self._pidfd = forks.fork(theirs)
            except (ProcessLostError, OSError):
                self._socket.close()
                raise
        self._closing = threading.Lock()
        self._closed = False
        self._order = order

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
        """Kill the process if the enclosed exchange takes longer, and raise ProcessHungError."""
        deadline = Deadline(seconds, self.kill)
        try:
            with deadline:
                yield deadline
        except LOST as error:
            if not deadline.missed:
                raise
            raise ProcessHungError("did not answer in time") from error

    def receive_into(self, memory: memoryview) -> None:
        """Fill memory with bytes that the process sends, outside of messages. Raises as a message
        does."""
        while memory:
            if not (received := self._socket.recv_into(memory, 0, socket.MSG_WAITALL)):
                raise EOFError
            memory = memory[received:]

    def kill(self) -> None:
        """End it at once, even if stopped, and unblock its readers and writers."""
        self._signal(signal.SIGKILL)
        # The kernel may not be able to end it now: it may wait for a disk.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End it and unblock its readers and writers. Idempotent."""
        self._signal(signal.SIGTERM)
        if not self._ended():
            self.kill()
            if not self._ended():
                logger.error("process %d can't be killed: leaving it behind", self.pid)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, once unused. Idempotent."""
        self.connection.close()
        self._socket.close()
        with self._closing:
            if not self._closed:
                os.close(self._pidfd)
            self._closed = True

    def _signal(self, number: signal.Signals) -> None:
        with self._closing:
            if not self._closed:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def _ended(self) -> bool:
        """Wait for its end; return False after a time-out."""
        with self._closing:
            if self._closed:
                return True
            watched = os.dup(self._pidfd)  # another thread may close it meanwhile
        try:
            poll = select.poll()  # select() takes no descriptor above 1,023
            poll.register(watched, select.POLLIN)
            return bool(poll.poll(_STOP_S * 1000))
        finally:
            os.close(watched)
