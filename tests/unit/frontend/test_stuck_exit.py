"""A frontend whose threads are stuck ends, so that its supervisor starts another."""

import signal
import sys
import time
from pathlib import Path

from common.observability.watchdog import MAX_STUCK
from tests.e2e.processes import Process, run_python

PROGRAM = """
import threading
from common.aio.watched_threads import WatchedThreads
from frontend.app import main

threads = WatchedThreads("media", {count}, 0.01)
for _ in range({count}):
    threads.submit(threading.Event().wait)
main()
"""


def test_more_stuck_threads_than_it_can_bear_end_it_with_status_1(tmp_path: Path) -> None:
    program = PROGRAM.format(count=MAX_STUCK + 1)
    flags = [f"--discovery={tmp_path}", "--mm-arena-gb=0.001", f"--uds={tmp_path}/socket"]
    ran = run_python("-c", program, *flags)
    assert ran.returncode == 1, ran.stdout[-3000:]
    assert f"more than {MAX_STUCK} threads are stuck" in ran.stdout


def test_as_many_as_it_can_bear_do_not(tmp_path: Path) -> None:
    program = PROGRAM.format(count=MAX_STUCK)
    socket = tmp_path / "socket"
    flags = [f"--discovery={tmp_path}", "--mm-arena-gb=0.001", f"--uds={socket}"]
    command = [sys.executable, "-c", program, *flags]
    running = Process("frontend", command, tmp_path / "log")
    while running.is_alive() and not socket.exists():
        time.sleep(0.05)
    running.signal(signal.SIGTERM)
    # It is told to end, and does not wait for the threads. Nobody calls that an error.
    assert running.wait(120) == 0, running.tail()
