"""Run each piece of a client's work in a fork of this process, within limits on time and memory.

No thread can be ended; a process can. The frontend sends the pieces to servers through a socket,
and forks itself only to parse long answers.
"""

import os
import resource
import select
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

TRIES: Final = 3

POLL_INTERVAL_S: Final = 1.0
"""Interval of looks at a child. One that sleeps in two of them, and took no CPU in between, waits
for a lock that another thread of this process held during the fork."""


class Bounds(NamedTuple):
    """Limits of one piece of work.

    Attributes:
        memory_bytes: beside those of this process.
        alarm_s: seconds on the clock, on a host whose cores are busy.
    """

    cpu_s: int
    memory_bytes: int
    alarm_s: int


def serve(
    connection: "Connection[bytes, Any]", answer: Callable[[Any], bytes], bounds: Bounds
) -> None:
    """Work for the frontend until it is gone."""
    while True:
        try:
            connection.send_bytes(forked(connection.recv(), answer, bounds))
        except (EOFError, ConnectionError):
            return


def forked(order: Any, answer: Callable[[Any], bytes], bounds: Bounds) -> bytes:
    """Return the answer of a child process; nothing if it ended before."""
    for _ in range(TRIES):
        said = _forked(order, answer, bounds)
        if said is not None:
            return said
    return b""


def _forked(order: Any, answer: Callable[[Any], bytes], bounds: Bounds) -> bytes | None:
    """Return as :func:`forked`, and None if the child hung."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # Files of the parent: an inherited connection or pipe stays open until the child ends.
            os.closerange(3, writer)
            os.closerange(writer + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            _limit(bounds)
            with os.fdopen(writer, "wb") as file:
                file.write(answer(order))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        hangs = _hangs(pid, reader)
        if hangs:
            os.kill(pid, signal.SIGKILL)
        said = file.read()
    _, status = os.waitpid(pid, 0)
    if hangs:
        return None
    return said if status == 0 else b""


def _hangs(pid: int, reader: int) -> bool:
    """Wait until a child writes or ends; return whether it hangs instead."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    before = None
    while not poll.poll(POLL_INTERVAL_S * 1e3):
        # After the command's name: the state, and from the 12th field on the CPU time.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "S" and fields[11:13] == before:
            return True
        before = fields[11:13]
    return False


def _limit(bounds: Bounds) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + bounds.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (bounds.cpu_s, bounds.cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(bounds.alarm_s)
