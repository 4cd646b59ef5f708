"""Entry point: run the worker under a parent process that cleans up after it.

Imports nothing heavy: the parent and every process that an engine spawns run this module too.
"""

import gc
import sys
from functools import partial

from backend_worker.supervise import supervise
from common.cli.command_line import WORKER
from common.cli.known_flags import leave_early
from common.startup_checks import check_worker, leave_if_wrong


def main() -> None:
    leave_early(sys.argv[1:], "worker", WORKER)
    leave_if_wrong("mmrouter worker", partial(check_worker, sys.argv[1:]))
    supervise()
    gc.disable()  # a fifth of the time is looking through what stays
    from backend_worker.worker import run  # seconds, for vLLM

    gc.enable()
    run()


if __name__ == "__main__":
    main()
