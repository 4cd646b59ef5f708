"""``python -m backend_worker``: the worker, under a parent that cleans up after it.

Nothing heavy is imported here: the parent and every process that an engine spawns run
this module too.
"""

import sys

from backend_worker.supervise import supervise
from common.shell_completion import print_completion
from common.version import version_line


def _completion(shell: str) -> str:
    from backend_worker.args import completion

    return completion(shell)


def main() -> None:
    """Be the parent, and the worker in a child of it."""
    if sys.argv[1:] == ["--version"]:
        print(version_line())
        return
    if sys.argv[1:2] == ["--completion"]:
        print_completion(_completion, sys.argv[2:])
    supervise()
    from backend_worker.worker import run

    run()


if __name__ == "__main__":
    main()
