"""The frontend with handles: arguments are the frontend's, after a FILE.

    python -m tests.chaos.watched_frontend FILE ARGUMENTS...

On SIGUSR1 the next few messages of KV events are lost before they are read, as a full queue
loses them. On SIGRTMIN its clock on the wall jumps, as far as Python's ``time`` shows it, and on
SIGRTMIN+1 it is right again. :mod:`tests.chaos.watched` has the other signals; reports go to FILE.
"""

import asyncio
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm.multimodal.media.connector import global_thread_pool

from frontend.app import main as run_frontend
from frontend.app import serve
from frontend.args import FrontendArgs
from frontend.processes import Siblings
from frontend.router import ZmqFeeds
from frontend.router.events.event_stream import EventStream, Replay
from tests.chaos.watched import watch

MAX_LOST_AT_ONCE = 20
FARTHEST_JUMP_S = 86_400.0


def full(pool: ThreadPoolExecutor) -> ThreadPoolExecutor:
    """With all its threads."""
    together = threading.Barrier(pool._max_workers)
    for _ in range(pool._max_workers):
        pool.submit(together.wait)
    return pool


class WallClock:
    """``time.time`` with an error. Linux has no clock on the wall for one process alone."""

    def __init__(self) -> None:
        self._right = time.time
        self._error_s = 0.0

    def install(self) -> None:
        time.time = lambda: self._right() + self._error_s
        time.time_ns = lambda: int(time.time() * 1e9)

    def jump(self) -> None:
        self._error_s = random.choice((-1, 1)) * FARTHEST_JUMP_S ** random.random()

    def put_right(self) -> None:
        self._error_s = 0.0


class Handles:
    """What the signals do."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._clock = WallClock()
        self._to_lose = 0
        self._lost = 0

    def install(self) -> None:
        handles = self

        class LossyStream(EventStream):
            """Loses messages before they are read."""

            def on_live(self, sequence_frame: bytes, payload: bytes, now: float) -> Replay | None:
                if handles._to_lose:
                    handles._to_lose -= 1
                    handles._lost += 1
                    return None
                return super().on_live(sequence_frame, payload, now)

        ZmqFeeds.stream_type = LossyStream
        loop = asyncio.get_running_loop()
        # What is made when it is first needed would look like a leak.
        loop.set_default_executor(full(ThreadPoolExecutor(thread_name_prefix="asyncio")))
        full(global_thread_pool)
        loop.add_signal_handler(signal.SIGUSR1, self._lose)
        watch(self._file, lambda: self._lost)
        self._clock.install()
        loop.add_signal_handler(signal.SIGRTMIN, self._clock.jump)
        loop.add_signal_handler(signal.SIGRTMIN + 1, self._clock.put_right)

    def _lose(self) -> None:
        self._to_lose = random.randint(1, MAX_LOST_AT_ONCE)


def main() -> None:
    handles = Handles(Path(sys.argv.pop(1)))

    async def watched(args: FrontendArgs, siblings: Siblings | None) -> None:
        handles.install()
        await serve(args, siblings)

    run_frontend(watched)


if __name__ == "__main__":
    main()
