"""From a command line to parsed flags: others' names become ours, and ``--config`` is read.

What is vLLM's is left over, for :mod:`common.cli.vllm_command_line`.
"""

import argparse
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import Field

from common.cli.config_file import ConfigFile
from common.cli.flag_aliases import Names
from common.cli.flag_settings import FlagSettings, add_all
from common.errors import ConfigurationError


class ConfigSettings(FlagSettings):
    """Where else flags stand."""

    flag_group: ClassVar[str] = "configuration"

    config: Path | None = Field(
        None,
        description="YAML file whose keys are flags without their dashes in front, vLLM's too; "
        "flags and the environment beat it",
    )


class CommandLine(NamedTuple):
    """What was given.

    Attributes:
        ours: our flags; as ``config_file`` the :class:`ConfigFile`, or None.
        rest: what the parser doesn't know.
    """

    ours: Namespace
    rest: list[str]

    @property
    def file(self) -> ConfigFile | None:
        """What stands in the file."""
        file: ConfigFile | None = self.ours.config_file
        return file


def read_command_line(
    parser: argparse.ArgumentParser,
    groups: Iterable[type[FlagSettings]],
    names: Names,
    argv: Sequence[str],
) -> CommandLine:
    """Parse with the flags of some groups, ``ConfigSettings`` among them, which are added to the
    parser.

    Raises:
        ConfigurationError: a flag or a key that means nothing here, or a file that can't be read.
        argparse.ArgumentError: if the parser doesn't end the process for it.
    """
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
    """The flags of some groups."""
    return frozenset(
        group.flag(name)
        for group in groups
        for name in group.declared()
        if name not in group.variables
    )
