"""The frontend, with a meter at its event loop: arguments are the frontend's, after a FILE.

    python -m tests.fuzz_http.watched_frontend FILE ARGUMENTS...

At the Unix socket FILE each line gets one of JSON, with the longest time since the last line that
the loop gave no turn to others.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path

from tests.beside_frontend import run_frontend_beside

TICK_S = 0.01
THREAD_POLL_S = 1.0


class Queued:
    """How long threads of this process stood in the kernel's queue for a core."""

    def __init__(self) -> None:
        self._own = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._others: dict[str, int] = {}
        self._looked = 0.0

    def own_s(self) -> float:
        return _queued_s(self._own)

    def all_s(self) -> float:
        """The sum of all threads."""
        if time.monotonic() > self._looked + THREAD_POLL_S:
            self._look()
        total = 0.0
        for descriptor in self._others.values():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                total += _queued_s(descriptor)
        return total

    def _look(self) -> None:
        self._looked = time.monotonic()
        there = {path.name for path in Path("/proc/self/task").iterdir()}
        for thread in self._others.keys() - there:
            os.close(self._others.pop(thread))
        for thread in there - self._others.keys():
            with contextlib.suppress(FileNotFoundError):
                path = f"/proc/self/task/{thread}/schedstat"
                self._others[thread] = os.open(path, os.O_RDONLY)


def _queued_s(descriptor: int) -> float:
    return int(os.pread(descriptor, 64, 0).split()[1]) * 1e-9


class Meter:
    """Wakes up a hundred times a second, and looks how late it is.

    On a machine that others use, most of that says what they do. Left out is the time for which
    the loop's thread was ready and had no core. What remains may be work of this process, a call
    that blocks, or a thread that holds the interpreter's lock and had no core itself. So it counts
    as far as the process computed meanwhile, and beyond that as far as no thread's wait for a core
    explains it.
    """

    def __init__(self) -> None:
        self._longest = 0.0
        self._queued = Queued()
        self._before = self._read()

    async def run(self, path: Path) -> None:
        server = await asyncio.start_unix_server(self._answer, path)
        async with server:
            while True:
                self._look()
                await asyncio.sleep(TICK_S)

    def _read(self) -> tuple[float, float, float, float]:
        queued = self._queued
        return time.perf_counter(), queued.own_s(), time.process_time(), queued.all_s()

    def _look(self) -> None:
        now = self._read()
        passed, own, computed, all_threads = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        late = passed - TICK_S - own
        self._longest = max(self._longest, min(late, computed), late - max(0.0, all_threads))
        self._before = now

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            self._look()
            writer.write(json.dumps({"stall_s": self._longest}).encode() + b"\n")
            self._longest = 0.0
            await writer.drain()


def main() -> None:
    path = Path(sys.argv.pop(1))
    run_frontend_beside(lambda: Meter().run(path))


if __name__ == "__main__":
    main()
