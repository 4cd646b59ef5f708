"""Flags that a command answers at once, before seconds of imports."""

import sys
from collections.abc import Callable

from common.shell_completion import print_completion
from common.version import version_line


def leave_early(argv: list[str], completion: Callable[[str], str]) -> None:
    """Answer ``--version`` or ``--completion SHELL``; return if it is neither.

    Args:
        argv: of the command, without its name.
        completion: makes the script for a shell.

    Raises:
        SystemExit: it was answered.
    """
    if argv == ["--version"]:
        print(version_line())
        sys.exit()
    if argv[:1] == ["--completion"]:
        print_completion(completion, argv[1:])
