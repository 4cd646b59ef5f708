"""The frontend, with an eye on its event loop: arguments are the frontend's, after a FILE.

    python -m tests.benchmarks.watched_frontend FILE ARGUMENTS...

On SIGUSR1 it writes to FILE, as JSON, for how long its event loop answered nobody at a time:
the 99th percentile and the maximum in milliseconds since the last such signal. What the
kernel counts as waiting for a core is left out, since that says what else runs here.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.beside_frontend import run_frontend_beside

TICK_S = 0.001


class Watch:
    """Wakes up a thousand times a second and looks how late it is."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._late: list[float] = []
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def _waited_s(self) -> float:
        return int(os.pread(self._schedstat, 64, 0).split()[1]) * 1e-9

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.write)
        before, waited = time.perf_counter(), self._waited_s()
        while True:
            await asyncio.sleep(TICK_S)
            now, waits = time.perf_counter(), self._waited_s()
            self._late.append(now - before - TICK_S - (waits - waited))
            before, waited = now, waits

    def write(self) -> None:
        late = sorted(self._late) or [0.0]
        self._late.clear()
        figures = {"p99": late[int(len(late) * 0.99)] * 1e3, "max": late[-1] * 1e3}
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(figures))
        partial.rename(self._file)


def main() -> None:
    run_frontend_beside(Watch(Path(sys.argv.pop(1))).run)


if __name__ == "__main__":
    main()
