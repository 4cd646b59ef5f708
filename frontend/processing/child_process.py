"""One process for media, as the thread that talks to it sees it.

Every wait for it has an end. If it does not answer in time it is killed and its connection shut
down, so that whoever reads from it or writes to it sees it gone.
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
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self

from frontend.media_processes import Ready, StartUp
from frontend.processing.errors import ProcessHungError, ProcessLostError
from frontend.processing.forks import START_S, Forks

logger = logging.getLogger(__name__)

LOST: Final = (EOFError, OSError)
"""How a connection says that the process at its other end is gone."""

_STOP_S: Final = 5.0


class Deadline:
    """Calls a function, in a thread, if what it is around takes too long.

    Attributes:
        missed: whether it did.
    """

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        """
        Args:
            give_up: makes whoever waits stop waiting.
        """
        self._at = time.monotonic() + seconds
        self._give_up = give_up
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="media-deadline", daemon=True)
        self.missed = False

    def extend(self, seconds: float) -> None:
        """There is more to do than was known at first."""
        self._at += seconds

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()  # so that nothing is given up after this

    def _watch(self) -> None:
        while (left := self._at - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        self.missed = True
        self._give_up()


class ChildProcess:
    """One process, as the thread that talks to it sees it.

    Attributes:
        pid: for the log.
    """

    def __init__(self, order: StartUp, forks: Forks) -> None:
        """Start it; it isn't ready yet. Raises ProcessLostError if that can't be done."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                forked = forks.fork(theirs)
            except ProcessLostError:
                self._socket.close()
                raise
        self.pid = forked.pid
        self._pidfd = forked.pidfd
        self._closing = threading.Lock()
        self._closed = False
        self.connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
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
        self._signal(signal.SIGKILL)
        # For the case that the kernel can't end it now: it may wait for a disk.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End it; whoever talks to it sees it gone. May be called twice."""
        self._signal(signal.SIGTERM)
        if not self._ended():
            self.kill()
            if not self._ended():
                logger.error("process %d can't be killed: leaving it behind", self.pid)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, once nobody uses it any more. May be called twice."""
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
        """Whether it ends within seconds."""
        with self._closing:
            if self._closed:
                return True
            watched = os.dup(self._pidfd)  # another thread may close it meanwhile
        try:
            return bool(select.select([watched], [], [], _STOP_S)[0])
        finally:
            os.close(watched)
