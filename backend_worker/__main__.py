"""Entry point: run the worker under a parent process that cleans up after it.

Imports nothing heavy: the parent and every process that an engine spawns run this module too.
"""

import atexit
import gc
import os
import sys
from functools import partial

from backend_worker.supervise import supervise
from common.cli.command_line import WORKER
from common.cli.known_flags import leave_early
from common.startup_checks import check_worker, leave_if_wrong


def _mute() -> None:
    """Drop what a binding library of vLLM's reports of itself when Python has ended: leaks, page
    after page."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def main() -> None:
    leave_early(sys.argv[1:], "worker", WORKER)
    leave_if_wrong("mmrouter worker", partial(check_worker, sys.argv[1:]))
    supervise()
    atexit.register(_mute)  # before vLLM's modules, so that it is called after theirs
    gc.disable()  # a fifth of the time is looking through what stays
    from backend_worker.worker import run  # seconds, for vLLM

    gc.enable()
    run()


if __name__ == "__main__":
    main()
