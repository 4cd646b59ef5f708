"""Shared listening sockets of a frontend's processes, and their connection counts.

All processes accept from one socket: an idle one takes the next connection, and a busy or dead one
leaves it to the others. With a socket for each (``SO_REUSEPORT``) the kernel would keep giving
connections to a process that is gone or hangs.
"""

import contextlib
import mmap
import os
import socket
import stat
from pathlib import Path
from typing import Final

from common.errors import ListenError

BACKLOG: Final = 2048
"""uvicorn's value."""


def listen(host: str | None, port: int, uds: str | None) -> list[socket.socket]:
    """Listen on a Unix socket, or a host's port (all addresses without it). Raises ListenError."""
    place = uds if uds is not None else f"{host or '*'}:{port}"
    with contextlib.ExitStack() as opened:
        try:
            sockets = [_on_path(uds)] if uds is not None else _on_port(host, port, opened)
        except OSError as error:
            raise ListenError(f"can't listen on {place}: {error}") from error
        opened.pop_all()
    for each in sockets:
        each.listen(BACKLOG)
        each.setblocking(False)
    return sockets


def _on_port(host: str | None, port: int, opened: contextlib.ExitStack) -> list[socket.socket]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        each = opened.enter_context(socket.socket(family, kind, protocol))
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        each.bind(address)
        sockets.append(each)
    return sockets


def _on_path(path: str) -> socket.socket:
    mode = 0o666
    with contextlib.suppress(FileNotFoundError):
        found = Path(path).stat().st_mode
        if stat.S_ISSOCK(found):  # left by a dead process; keep its mode, as uvicorn does
            mode = stat.S_IMODE(found)
            Path(path).unlink()
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(path)
        Path(path).chmod(mode)
    except OSError:
        made.close()
        raise
    return made


def name_of(listener: socket.socket) -> str:
    where = listener.getsockname()
    return where if isinstance(where, str) else f"{where[0]}:{where[1]}"


_NOT_ACCEPTING: Final = -1


class ConnectionCounts:
    """Connection count of each process, in shared memory. Every process writes its own only.

    All accept from one socket, and of several idle ones the kernel wakes the same first each time:
    it would get all connections of a client that opens them one after the other and keeps them.
    """

    def __init__(self, descriptor: int, processes: int) -> None:
        """Map the memory of a descriptor from :meth:`make`."""
        self._counts = memoryview(mmap.mmap(descriptor, 8 * processes)).cast("q")

    @staticmethod
    def make(processes: int) -> int:
        """Return a descriptor of memory in which no process accepts yet."""
        descriptor = os.memfd_create("mmrouter-connections", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 8 * processes)
        counts = ConnectionCounts(descriptor, processes)
        for process in range(processes):
            counts.not_accepting(process)
        return descriptor

    def set(self, process: int, connections: int) -> None:
        self._counts[process] = connections

    def not_accepting(self, process: int) -> None:
        self._counts[process] = _NOT_ACCEPTING

    def another_has_fewer(self, process: int) -> bool:
        """Return whether another accepting process has fewer connections."""
        own = self._counts[process]
        return any(_NOT_ACCEPTING < count < own for count in self._counts)
