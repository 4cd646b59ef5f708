"""Signals that all watched processes answer.

On SIGUSR2 a process writes a report to a file. On SIGRTMIN+2 it leaks one resource of each kind.
``python -m tests.chaos.watched FILE`` is a process that does nothing else.
"""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.chaos.planted import Planted
from tests.chaos.report import ReportFile, make_report

PLANT = signal.SIGRTMIN + 2


def watch(file: Path, lost: Callable[[], int] = lambda: 0) -> None:
    """Answer the signals on the running event loop.

    Args:
        file: for reports.
        lost: number of messages of KV events that were lost on purpose.
    """
    loop = asyncio.get_running_loop()
    reports, planted = ReportFile(file), Planted()
    loop.add_signal_handler(signal.SIGUSR2, lambda: reports.write(make_report(lost())))
    loop.add_signal_handler(PLANT, planted.plant)


async def _only_watched(file: Path) -> None:
    watch(file)
    ReportFile(file).write(make_report())
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_only_watched(Path(sys.argv[1])))
