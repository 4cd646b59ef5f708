"""What a command answers at once: its version, help, and flags that do not exist."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from common.cli.command_line import Names
from common.cli.known_flags import KnownFlags, version_line
from common.errors import ConfigurationError


def leave_early(argv: Sequence[str], command: str, names: Names) -> None:
    """End the process if it was asked for what needs no vLLM, or asked wrongly; else return.

    Args:
        argv: arguments of the command.
        command: ``frontend`` or ``worker``.
        names: other names of its flags.

    Raises:
        SystemExit: with status 0 if it was answered, 1 without vLLM, and 2 if a flag is wrong.
    """
    if "--version" in argv:
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
    known = KnownFlags.of(command)
    if known is None:
        return  # of that version nothing is known: the parsers say what is wrong
    try:
        _answer(argv, known)
        known.check(argv, names, os.environ)
    except ConfigurationError as error:
        usage = known.help.partition("\n")[0]
        print(f"{usage}\n{known.prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    if "--check-flags" in argv:
        print("flags, keys of the file and choices are known; other values are checked at start")
        sys.exit()


def _answer(argv: Sequence[str], known: KnownFlags) -> None:
    if {"-h", "--help"} & set(argv):
        _print(known.help)
    if "--help=all" in argv:
        _print(known.help_all)
    if any(word.startswith("--help=") for word in argv):
        raise ConfigurationError("--help takes nothing, or all")


def _print(text: str) -> NoReturn:
    print(text)
    sys.exit()
