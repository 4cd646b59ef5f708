"""``python -m frontend``: the OpenAI endpoint in front of the workers."""

import gc
import os
import sys
from functools import partial

from common.cli.command_line import FRONTEND
from common.cli.known_flags import DOCTOR, leave_early
from common.startup_checks import check_frontend, leave_if_wrong
from common.vllm_compat.preflight import use_cpu_only


def _check(argv: list[str]) -> int:
    try:
        from frontend.check import run
    except (ImportError, OSError, RuntimeError) as error:
        print(
            f"can't serve: what vLLM needs can't be loaded ({error}); `make setup` installs "
            "packages that fit each other"
        )
        return 1
    return run(argv)


def main() -> None:
    """Serve until SIGTERM or SIGINT. Exit 1: can't serve, 2: cards unreadable, 3: port taken."""
    use_cpu_only()  # the processes that this one starts inherit it
    argv = [each for each in sys.argv[1:] if each != "--check"]
    only_checks = len(argv) < len(sys.argv[1:])
    leave_early(sys.argv[1:], "frontend", FRONTEND)
    from frontend.processes import MEMBER, run_processes

    if MEMBER not in os.environ:  # the processes of one frontend share what their parent checked
        prog = DOCTOR if only_checks else "mmrouter frontend"
        leave_if_wrong(prog, partial(check_frontend, argv, listens=not only_checks))
    if only_checks:
        sys.exit(_check(argv))

    status = run_processes(argv)
    if status is None:
        gc.disable()  # a fifth of the time is looking through what stays
        from frontend.app import main as serve_here  # seconds, for vLLM

        gc.enable()
        serve_here()
    sys.exit(status)


if __name__ == "__main__":
    main()
