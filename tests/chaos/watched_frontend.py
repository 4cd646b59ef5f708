"""The frontend with two handles: arguments are the frontend's, after a FILE.

    python -m tests.chaos.watched_frontend FILE ARGUMENTS...

On SIGUSR1 the next few messages of KV events are lost before they are read, as a full queue
loses them. On SIGUSR2 it writes to FILE, as JSON, how many tasks it has and how many messages
it lost.
"""

import asyncio
import gc
import json
import random
import signal
import sys
from pathlib import Path

from frontend import __main__ as frontend
from frontend.args import FrontendArgs
from frontend.router.event_stream import Command, EventStream

MOST_LOST_AT_ONCE = 20


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
        loop.add_signal_handler(signal.SIGUSR1, self._lose)
        loop.add_signal_handler(signal.SIGUSR2, self._write)

    def _lose(self) -> None:
        self._to_lose = random.randint(1, MOST_LOST_AT_ONCE)

    def _write(self) -> None:
        gc.collect()
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps({"tasks": len(asyncio.all_tasks()), "lost": self._lost}))
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
