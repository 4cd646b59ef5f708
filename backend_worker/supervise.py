"""A small parent process that cleans up after a worker which was killed.

vLLM's engine processes do not notice that the process which started them is gone; they
would keep their GPU memory, and no worker could be started in its place. The parent
adopts what a worker leaves behind and ends it. It imports nothing of vLLM.
"""

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

from common.python_command import python_command

SUPERVISED = "MMROUTER_SUPERVISED_BY"
"""Set in the worker's environment to the pid of its parent."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def is_supervised() -> bool:
    """Whether this process is the worker rather than its parent."""
    return os.environ.get(SUPERVISED) == str(os.getppid())


def supervise(argv: list[str]) -> int:
    """Run the worker, pass signals on to it, and end whatever it leaves.

    Returns:
        The worker's exit status; 128 plus the signal's number if one killed it.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if worker is None:
            early.append(number)
        else:
            worker.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    worker = subprocess.Popen(
        [*python_command("backend_worker"), *argv],
        env=os.environ | {SUPERVISED: str(os.getpid())},
        preexec_fn=_stop_with_the_parent,
    )
    for received in early:
        worker.send_signal(received)
    status = worker.wait()
    _end_descendants()
    return status if status >= 0 else 128 - status


def _stop_with_the_parent() -> None:
    """If the parent is killed, the worker stops as if it had been asked to."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_descendants() -> None:
    started = time.monotonic()
    while (left := _descendants(os.getpid())) and time.monotonic() < started + _REAP_S:
        for pid in left:
            if _cleans_up(pid) and time.monotonic() < started + _REAP_S / 2:
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        # Orphans become our children one generation at a time.
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.05)


def _cleans_up(pid: int) -> bool:
    """Python's resource tracker removes shared memory once its users are gone, then ends."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except FileNotFoundError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found
