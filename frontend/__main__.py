"""``python -m frontend``: the OpenAI endpoint in front of the workers."""

import sys

from common.shell_completion import print_completion
from common.version import version_line
from frontend.processes import run_processes


def _completion(shell: str) -> str:
    from frontend.args import completion

    return completion(shell)


def main() -> None:
    """Serve until SIGTERM or SIGINT. Exit status 1 if that is impossible, 2 if cards can't be
    read where they should be, or uvicorn's 3 if the port can't be had.
    """
    if sys.argv[1:] == ["--version"]:
        print(version_line())
        return
    if sys.argv[1:2] == ["--completion"]:
        print_completion(_completion, sys.argv[2:])
    status = run_processes(sys.argv[1:])
    if status is None:
        from frontend.process import main as serve_here  # seconds, for vLLM

        serve_here()
    sys.exit(status)


if __name__ == "__main__":
    main()
