"""The frontend with two handles: arguments are the frontend's, after a FILE.

    python -m tests.chaos.watched_frontend FILE ARGUMENTS...

On SIGUSR1 the next few messages of KV events are lost before they are read, as a full queue
loses them. On SIGUSR2 it writes a report to FILE.
"""

import asyncio
import gc
import random
import re
import signal
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import zmq.utils.garbage
from vllm.multimodal.media.connector import global_thread_pool

from frontend import __main__ as frontend
from frontend.args import FrontendArgs
from frontend.router.event_stream import Command, EventStream
from tests.chaos.report import Report

MOST_LOST_AT_ONCE = 20


def full(pool: ThreadPoolExecutor) -> ThreadPoolExecutor:
    """With all its threads."""
    together = threading.Barrier(pool._max_workers)
    for _ in range(pool._max_workers):
        pool.submit(together.wait)
    return pool


class Handles:
    """What the two signals do."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._to_lose = 0
        self._lost = 0
        self._on_live = EventStream.on_live

    def install(self) -> None:
        handles = self

        def on_live(
            stream: EventStream, sequence_frame: bytes, payload: bytes, now: float
        ) -> list[Command]:
            if handles._to_lose:
                handles._to_lose -= 1
                handles._lost += 1
                return []
            return handles._on_live(stream, sequence_frame, payload, now)

        EventStream.on_live = on_live  # type: ignore[assignment,method-assign]
        loop = asyncio.get_running_loop()
        # What is made when it is first needed would look like a leak.
        loop.set_default_executor(full(ThreadPoolExecutor(thread_name_prefix="asyncio")))
        full(global_thread_pool)
        zmq.utils.garbage.gc.start()  # has a context and a thread, for frames sent without a copy
        zmq.utils.garbage.gc._push_socket  # noqa: B018 # is made by asking for it
        loop.add_signal_handler(signal.SIGUSR1, self._lose)
        loop.add_signal_handler(signal.SIGUSR2, self._write)

    def _lose(self) -> None:
        self._to_lose = random.randint(1, MOST_LOST_AT_ONCE)

    def _write(self) -> None:
        gc.collect()
        partial = self._file.with_suffix(".partial")
        threads = Counter(re.sub(r"[\d_-]+$", "", each.name) for each in threading.enumerate())
        report = Report(len(asyncio.all_tasks()), self._lost, dict(threads))
        partial.write_bytes(msgspec.json.encode(report))
        partial.rename(self._file)


def main() -> None:
    handles = Handles(Path(sys.argv.pop(1)))
    original = frontend._run

    async def watched(args: FrontendArgs) -> None:
        handles.install()
        await original(args)

    frontend._run = watched
    frontend.main()


if __name__ == "__main__":
    main()
