"""Entry point: run the worker under a parent process that cleans up after it.

Imports nothing heavy: the parent and every process that an engine spawns run this module too.
"""

import sys

from backend_worker.supervise import supervise
from common.cli.command_line import WORKER
from common.cli.known_flags import leave_early
from common.vllm_compat.preflight import fault_of, model_in


def main() -> None:
    leave_early(sys.argv[1:], "worker", WORKER)
    said = model_in(sys.argv[1:])
    if said is not None and (fault := fault_of(*said)) is not None:
        print(f"mmrouter worker: error: {fault}", file=sys.stderr)
        sys.exit(2)
    supervise()
    from backend_worker.worker import run

    run()


if __name__ == "__main__":
    main()
