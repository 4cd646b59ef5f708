"""Parent process that cleans up after a killed worker.

vLLM's engine processes do not notice the death of their parent. They would keep their GPU memory,
and no new worker could start. This process adopts and ends them. It imports nothing of vLLM.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from backend_worker.engine.ipc_names import remove_memory
from common.aio.processes import end_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 10.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_libc = ctypes.CDLL(None, use_errno=True)


def supervise() -> None:
    """Fork; the child returns and is the worker. The parent forwards signals, ends the worker's
    descendants, and exits with its status, or with 128 plus a signal's number."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    # A signal that comes now waits until a handler exists.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    worker = os.fork()
    if worker == 0:
        _stop_with_the_parent(parent)
    else:
        _pass_signals_on(worker)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    if worker == 0:
        return
    # The pid stays reserved until it is waited for, so no other process gets its signals.
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(worker, 0)
    _end_descendants()
    remove_memory(worker)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(f"mmrouter worker: killed by {signal.Signals(-code).name}", file=sys.stderr)
    sys.exit(code if code >= 0 else 128 - code)


def _pass_signals_on(worker: int) -> None:
    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(worker, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)


def _stop_with_the_parent(parent: int) -> None:
    """Stop the worker as by SIGTERM if the parent is killed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if a shell had it ignored
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


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
    """Return whether it is Python's resource tracker, which cleans shared memory and ends."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return found
    for task in tasks:
        try:
            children = [int(child) for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found
