"""Parse a command line: resolve aliases and read ``--config``.

vLLM, Dynamo, vllm-router and SMG name some of our flags differently. An alias also works as a key
of the file, and its value is converted where the scales differ. vLLM's own flags are left over for
:mod:`common.cli.vllm_command_line`.
"""

import argparse
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple, TypeAlias

from pydantic import Field

from common.cli.flag_settings import ConfigFile, FlagSettings, add_all
from common.errors import ConfigurationError

Convert: TypeAlias = Callable[[str], tuple[str, ...]]


def _same(value: str) -> tuple[str, ...]:
    return (value,)


@dataclass(frozen=True)
class Alias:
    """Another name for flags of ours or vLLM's.

    Attributes:
        of: the project that uses this name.
        convert: returns one value per flag; a ValueError says why not.
        note: describes the conversion, if any.
    """

    of: str
    flags: tuple[str, ...]
    convert: Convert = _same
    note: str = ""
    takes_value: bool = True

    def values(self, name: str, value: str) -> list[tuple[str, str]]:
        """Return our flags with their values. Raises ConfigurationError: no counterpart."""
        try:
            return list(zip(self.flags, self.convert(value), strict=True))
        except ValueError as error:
            raise ConfigurationError(f"{name}={value!r} is unusable: {error}") from error


@dataclass(frozen=True)
class Names:
    """Aliases of one process, by flag."""

    aliases: Mapping[str, Alias]

    def in_arguments(self, argv: Iterable[str]) -> list[str]:
        """Replace aliases, and underscores by dashes. Raises ConfigurationError: no counterpart."""
        words = iter(argv)
        return [ours for word in words for ours in self._ours(word, words)]

    def _ours(self, word: str, following: Iterator[str]) -> list[str]:
        if not word.startswith("-"):
            return [word]
        name, equals, value = word.partition("=")
        if name.startswith("--") and "." not in name:
            name = "--" + name.removeprefix("--").replace("_", "-")
        alias = self.aliases.get(name)
        if alias is None:
            return [name + equals + value]
        if alias.takes_value and not equals:
            try:
                value = next(following)
            except StopIteration:
                raise ConfigurationError(f"{name} needs a value") from None
        elif equals and not alias.takes_value:
            raise ConfigurationError(f"{name} takes no value")
        return [f"{flag}={ours}" for flag, ours in alias.values(name, value)]

    def in_file(self, file: ConfigFile) -> ConfigFile:
        """Replace a file's aliases. Raises ConfigurationError: no counterpart, or a duplicate."""
        values: dict[str, object] = {}
        for key, value in file.values.items():
            for ours, converted in self._of_key(file, key, value):
                if ours in values or (ours != key and ours in file.values):
                    raise ConfigurationError(f"{file.path}: {key} says the same as {ours}")
                values[ours] = converted
        return ConfigFile(file.path, values)

    def _of_key(self, file: ConfigFile, key: str, value: object) -> list[tuple[str, object]]:
        alias = self.aliases.get(f"--{key}")
        if alias is None or value is None:
            return [(key, value)] if alias is None else []
        if not alias.takes_value:
            if not isinstance(value, bool):
                raise ConfigurationError(f"{file.path}: {key}={value!r} is neither true nor false")
            if not value:
                return []
        try:
            made = alias.values(key, str(value))
        except ConfigurationError as error:
            raise ConfigurationError(f"{file.path}: {error}") from error
        return [(flag.removeprefix("--"), converted) for flag, converted in made]


_DYNAMO: Final = "Dynamo"
_ROUTERS: Final = "vllm-router, SMG"


def _more_than(value: str) -> tuple[str, ...]:
    return ("0",) if value == "None" else (str(int(value) + 1),)


def _mebibytes(value: str) -> tuple[str, ...]:
    return (f"{int(value) / 2**20:.17g}",)


_POLICIES: Final = {
    "cache_aware": "kv",
    "round_robin": "round-robin",
}


def _mode(policy: str) -> tuple[str, ...]:
    if policy not in _POLICIES:
        raise ValueError(f"--router-mode has nothing like it, only like {', '.join(_POLICIES)}")
    return (_POLICIES[policy],)


_DRAIN: Final = Alias("vllm serve", ("--drain-timeout",), note="seconds; vLLM's default is 0")
_BUSY_BLOCKS: Final = Alias(
    _DYNAMO,
    ("--router-busy-blocks-fraction",),
    lambda value: ("1",) if value == "None" else (value,),
    "None is 1, which is never",
)

_FRONTEND_ALIASES: Final[dict[str, Alias]] = {
    "--api-server-count": Alias("vllm serve", ("--processes",)),
    "-asc": Alias("vllm serve", ("--processes",)),
    "--shutdown-timeout": _DRAIN,
    "--http-host": Alias(_DYNAMO, ("--host",)),
    "--http-port": Alias(_DYNAMO, ("--port",)),
    "--tls-cert-path": Alias("Dynamo, SMG", ("--ssl-certfile",)),
    "--tls-key-path": Alias("Dynamo, SMG", ("--ssl-keyfile",)),
    "--active-decode-blocks-threshold": _BUSY_BLOCKS,
    "--active-prefill-tokens-threshold": Alias(
        _DYNAMO,
        ("--router-busy-prefill-tokens",),
        _more_than,
        "a worker is busy above it there and from it on here, so one is added; None is 0, never",
    ),
    "--policy": Alias(
        _ROUTERS, ("--router-mode",), _mode, ", ".join(f"{a} is {b}" for a, b in _POLICIES.items())
    ),
    "--max-concurrent-requests": Alias(_ROUTERS, ("--max-inflight",)),
    "--max-payload-size": Alias(
        _ROUTERS, ("--max-body-mb",), _mebibytes, "bytes, which become MiB"
    ),
    "--request-timeout-secs": Alias(_ROUTERS, ("--request-timeout",)),
    "--shutdown-grace-period-secs": Alias("SMG", ("--drain-timeout",)),
    "--disable-retries": Alias(
        _ROUTERS, ("--migration-limit",), lambda _: ("0",), "becomes 0", takes_value=False
    ),
    "--cb-timeout-duration-secs": Alias(
        _ROUTERS,
        ("--router-eject-base",),
        note="always the same time there; here it doubles with each relapse",
    ),
}

FRONTEND: Final = Names(MappingProxyType(_FRONTEND_ALIASES))  # at a frontend

WORKER: Final = Names(MappingProxyType({"--shutdown-timeout": _DRAIN}))
"""At a worker, whose flags are vLLM's own anyway."""


class ConfigSettings(FlagSettings):
    """The configuration file."""

    flag_group: ClassVar[str] = "configuration"

    config: Path | None = Field(
        None,
        description="YAML file whose keys are flags without their dashes in front, vLLM's too; "
        "flags and the environment beat it",
    )


def is_flag(word: str) -> bool:
    """Return whether it is a flag and not a value such as -1 or {"a": -1}."""
    return re.match(r"--?[A-Za-z]", word) is not None


def value_of(flag: str, words: Sequence[str]) -> str | None:
    """Return the last value of a flag on a command line."""
    value = None
    for number, word in enumerate(words):
        if word.startswith(f"{flag}="):
            value = word.partition("=")[2]
        elif word == flag and number + 1 < len(words):
            value = words[number + 1]
    return value


class CommandLine(NamedTuple):
    """Our flags, with the file as ``config_file``, and the words that the parser doesn't know."""

    ours: Namespace
    rest: list[str]

    @property
    def file(self) -> ConfigFile | None:
        file: ConfigFile | None = self.ours.config_file
        return file

    def of_vllm(self, name: str) -> str | None:
        """Return what one of vLLM's flags says, or else its key of the file; the first of several
        values, unchecked."""
        said: object = value_of(f"--{name}", self.rest)
        if said is None and self.file is not None:
            said = self.file.values.get(name)
        if isinstance(said, list):
            said = next(iter(said), None)
        return None if said is None else str(said)


def read_command_line(
    parser: argparse.ArgumentParser,
    groups: Iterable[type[FlagSettings]],
    names: Names,
    argv: Sequence[str],
) -> CommandLine:
    """Add the groups' flags to the parser, ``ConfigSettings`` among them, and parse. Raises
    ConfigurationError: a flag, a key or the file. Raises argparse.ArgumentError unless the parser
    exits."""
    add_all(parser, groups)
    ours, rest = parser.parse_known_args(names.in_arguments(argv))
    path = ConfigSettings.from_args(ours).config
    ours.config_file = None
    if path is not None:
        file = ConfigFile.read(path)
        if "config" in file.values:
            raise ConfigurationError(f"{path}: config can't stand in a file")
        ours.config_file = names.in_file(file)
    return CommandLine(ours, rest)


def flags_of(groups: Iterable[type[FlagSettings]]) -> frozenset[str]:
    return frozenset(
        group.flag(name)
        for group in groups
        for name in group.declared()
        if name not in group.variables
    )
