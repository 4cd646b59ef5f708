"""Leaks on purpose, one of each kind: what the census of a soak must find."""

import asyncio
import os
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Final

import zmq

from tests.chaos.resources import MEMORY

SHARED_MEMORY: Final = Path("/dev/shm")
IN_SHARED_MEMORY: Final = "shared memory"
TEMPORARY: Final = "temporary files"

MEMORY_MIB: Final = 96
"""More than allocators are granted."""

COMMAND: Final = ("sleep", "86400")
_WITHIN: Final = (
    "tasks",
    MEMORY,
    "socket handles",
    "/dev/zero handles",
    "threads planted",
    "ZeroMQ sockets PUSH",
    "sleep *: processes",
)
_HELD: Final = ("arena_leases", "inflight_requests", "requests at workers", "requests running")

PLANTED: Final = (
    *(f"{who}: {what}" for who in ("frontend a", "worker w0") for what in _WITHIN),
    *(f"frontend a: {what}" for what in _HELD),
    f"{IN_SHARED_MEMORY}: planted-*",
    f"{TEMPORARY}: planted-*",
)
"""Names in a census of what the two processes leak, and of what held requests are."""


class Planted:
    """What a process leaks. It stays as long as this object."""

    def __init__(self) -> None:
        self._memory = b""
        self._tasks: list[asyncio.Task[object]] = []
        self._files: list[int | socket.socket | zmq.Socket[bytes]] = []
        self._children: list[subprocess.Popen[bytes]] = []

    def plant(self) -> None:
        """Leak one of each kind."""
        self._tasks.append(asyncio.create_task(asyncio.Event().wait()))
        self._memory += b"x" * (MEMORY_MIB << 20)
        self._files += [os.open("/dev/zero", os.O_RDONLY), *socket.socketpair()]
        self._files.append(zmq.Context.instance().socket(zmq.PUSH))
        threading.Thread(target=threading.Event().wait, name="planted", daemon=True).start()
        self._children.append(subprocess.Popen(COMMAND, start_new_session=True))
        for directory in (SHARED_MEMORY, Path(tempfile.gettempdir())):
            (directory / f"planted-{os.getpid()}").touch()
