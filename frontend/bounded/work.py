"""Run one piece of a client's work at a time in a child process (:mod:`frontend.bounded.forks`)."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Final

from common.aio.cleanup import undo_on_error
from common.aio.processes import SpawnedProcess
from common.errors import OverloadedError
from frontend.bounded.forks import TRIES, Bounds

REAP_S: Final = 2.0
"""Seconds that a killed process may take to end."""

START_S: Final = 60.0
"""Seconds for the imports of the process, on a host whose cores are busy."""


class BoundedWork:
    """The child process, started on demand and after a loss. For one event loop."""

    def __init__(
        self,
        command: Sequence[str],
        what: str,
        wait_s: float,
        bounds: Bounds,
        greeting: Callable[[], object] | None = None,
    ) -> None:
        """Append a file descriptor to ``command``. ``greeting`` makes the first message, in a
        thread. Requests wait ``wait_s`` seconds for earlier work. A process that takes longer than
        ``bounds`` allow is replaced.
        """
        self._command: Final = command
        self._what: Final = what
        self._wait_s: Final = wait_s
        self._most_s: Final = TRIES * bounds.alarm_s + START_S
        self._greeting: Final = greeting
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix=what)
        self._turn: Final = asyncio.Semaphore(1)
        self.process: Process | None = None
        self._closed = False

    def start_soon(self) -> None:
        """Start the process, in a thread."""
        self._thread.submit(self._start)

    def close(self) -> None:
        """End the process. May take a moment: not on the event loop."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.process is not None:
            self.process.close()

    async def ask(self, order: Any) -> bytes:
        """Return the answer; empty if it took too much. Raises OverloadedError if earlier work
        takes too long, or the process was lost twice.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turn.acquire()
        except TimeoutError as error:
            raise OverloadedError(
                f"too many {self._what} of other requests are being worked on"
            ) from error
        with undo_on_error(self._turn.release):  # no thread may be to be had
            asking = asyncio.get_running_loop().run_in_executor(self._thread, self._ask, order)
        # Only after the answer, even if its client has left.
        asking.add_done_callback(lambda _: self._turn.release())
        said = await asyncio.shield(asking)
        if said is None:
            raise OverloadedError(f"the process for {self._what} was lost: try again later")
        return said

    def _ask(self, order: Any) -> bytes | None:
        for _ in range(2):  # forks do the work, so the order did not end the process
            try:
                return self._start().ask(order)
            except (EOFError, OSError):
                if self.process is not None:
                    self.process.close()
                    self.process = None
        return None

    def _start(self) -> "Process":
        if self.process is None:
            greeting = None if self._greeting is None else self._greeting()
            self.process = Process(self._command, self._most_s)
            if self._closed:  # meanwhile, when there was no process to end
                self.process.close()
                raise EOFError
            if greeting is not None:
                self.process.connection.send(greeting)
        return self.process


class Process:
    """One run of the process."""

    def __init__(self, command: Sequence[str], most_s: float) -> None:
        """Sending and receiving raise OSError if they make no progress for ``most_s`` seconds."""
        self.spawned = SpawnedProcess(lambda end: [*command, str(end)])
        limit = struct.pack("ll", *divmod(int(most_s * 1e6), 1_000_000))  # timeval, socket(7)
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self.spawned.socket.setsockopt(socket.SOL_SOCKET, direction, limit)
        self.connection: Connection[Any, bytes] = Connection(self.spawned.socket.detach())

    def ask(self, order: Any) -> bytes:
        """Return the answer, in the calling thread. Raises EOFError or OSError: process lost."""
        self.connection.send(order)
        return self.connection.recv_bytes()

    def close(self) -> None:
        self.spawned.kill()
        with contextlib.suppress(OSError):
            self.connection.close()
        self.spawned.reap(REAP_S)
