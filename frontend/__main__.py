"""``python -m frontend``: the OpenAI endpoint in front of the workers."""

import sys

from common.version import version_line
from frontend.processes import run_processes


def main() -> None:
    """Serve until SIGTERM or SIGINT. Exit status 1 if that is impossible, 2 if cards can't be
    read where they should be, or uvicorn's 3 if the port can't be had.
    """
    if sys.argv[1:] == ["--version"]:
        print(version_line())
        return
    status = run_processes(sys.argv[1:])
    if status is None:
        from frontend.process import main as serve_here  # seconds, for vLLM

        serve_here()
    sys.exit(status)


if __name__ == "__main__":
    main()
