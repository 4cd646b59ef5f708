"""What a watched process says of itself when it is asked."""

import asyncio
import gc
import re
import threading
from collections import Counter
from pathlib import Path

import msgspec
import zmq


class Report(msgspec.Struct):
    """Of one frontend or worker.

    Attributes:
        tasks: of its event loop.
        lost: messages of KV events that were lost on purpose.
        threads: of Python by name, without the numbers that pools give them.
        sockets: of ZeroMQ, by type; each has an eventfd, and so has libzmq's end of a monitor.
    """

    tasks: int
    lost: int
    threads: dict[str, int]
    sockets: dict[str, int]


def make_report(lost: int = 0) -> Report:
    """Report on this process, from its event loop."""
    gc.unfreeze()  # vLLM's server hides from it what there was at start: the first sockets
    gc.collect()
    threads = Counter(re.sub(r"[\d_-]+$", "", each.name) for each in threading.enumerate())
    return Report(len(asyncio.all_tasks()), lost, dict(threads), _open_sockets())


class ReportFile:
    """Where a process leaves its report for who asked."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def forget(self) -> None:
        """Remove an earlier report."""
        self._path.unlink(missing_ok=True)

    def write(self, report: Report) -> None:
        """Write a report so that a reader never finds half of it."""
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(report))
        partial.rename(self._path)

    def read(self) -> Report | None:
        """Return the report; None if it isn't there yet."""
        if not self._path.exists():
            return None
        return msgspec.json.decode(self._path.read_bytes(), type=Report)


def _open_sockets() -> dict[str, int]:
    """Count the sockets that pyzmq knows, but not views of others."""
    return dict(
        Counter(
            zmq.SocketType(each.socket_type).name
            for each in gc.get_objects()
            if isinstance(each, zmq.Socket) and not each.closed and not each._shadow
        )
    )
