"""What a command answers at once, before seconds of imports."""

import importlib.util
import sys
from collections.abc import Callable

from common.cli.shell_completion import print_completion
from common.version import version_line


def leave_early(argv: list[str], completion: Callable[[str], str]) -> None:
    """Answer ``--version`` or ``--completion SHELL``, or that vLLM is missing; return if it is none
    of these.

    Args:
        argv: of the command, without its name.
        completion: makes the script for a shell.

    Raises:
        SystemExit: it was answered.
    """
    if argv == ["--version"]:
        print(version_line())
        sys.exit()
    if importlib.util.find_spec("vllm") is None:
        # No dependency of the package's: which build it has to be only its user knows.
        print(
            "error: vLLM is not installed here: pip install 'vllm[audio]==0.32.0', "
            "or see README.md",
            file=sys.stderr,
        )
        sys.exit(1)
    if argv[:1] == ["--completion"]:
        print_completion(completion, argv[1:])
