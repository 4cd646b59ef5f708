"""Make what :mod:`common.cli.known_flags` reads, from the declarations of our flags and vLLM's."""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from pydantic.fields import FieldInfo

from common.cli.flag_settings import FlagSettings, add_all
from common.cli.known_flags import SHELLS, KnownFlags, Number
from common.cli.vllm_command_line import VllmParser
from common.cli.vllm_flags import ENGINE_AT_FRONTEND, SERVER, SERVER_AT_WORKER, SERVER_REFUSED
from common.vllm_compat import engine_arguments

NAMES: Final = frozenset(
    {
        *SERVER, *SERVER_REFUSED, *SERVER_AT_WORKER, *ENGINE_AT_FRONTEND, *engine_arguments.ON_CARD,
        *engine_arguments.REFUSED, *engine_arguments.IRRELEVANT, *engine_arguments.IDLE,
    }
)  # fmt: skip
"""All arguments of vLLM's, with underscores."""

OWN: Final = {
    "--version": "print the versions of mmrouter and vLLM",
    "--help": "print the flags that are needed first; --help=all prints every one",
    "--completion": "print what a shell needs to complete the flags: bash, zsh or fish",
    "--check-flags": "say whether all flags are known, without starting anything",
}
"""Flags that are answered before any parser is made."""

_FILE: Final = re.compile(r"-file$|keyfile$|certfile$|-ca-certs$|^--config$|^--chat-template$")
_DIRECTORY: Final = re.compile(r"-dir$|-path$")
_MAX_HELP_LEN: Final = 80
_MAX_METAVAR_LEN: Final = 60
_WIDTH: Final = 96
_MANY: Final = 1 << 16  # words


class Completed(NamedTuple):
    """How a shell completes a flag and its value."""

    help: str = ""
    takes: Literal["nothing", "text", "file", "directory"] = "text"
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """How a command is called, and what is said of it.

    Attributes:
        prog: how it is called.
        usage: what stands behind that.
        about: a sentence of what it is.
        first: flags that people need first, in this order.
        own: flags beside ``OWN`` that no parser has, with their help.
    """

    prog: str
    usage: str
    about: str
    first: Sequence[str]
    own: Mapping[str, str] = field(default_factory=dict)


def make_table(
    command: Command,
    groups: Sequence[type[FlagSettings]],
    add_vllms: Callable[[VllmParser], object],
    refusal: Callable[[str], str | None],
) -> tuple[KnownFlags, dict[str, Completed]]:
    """Return what is known of a command's flags, and those that shells complete.

    Args:
        groups: our flags.
        add_vllms: adds vLLM's flags to a parser.
        refusal: why a flag of vLLM's is not taken, by its name with underscores; None if it is.
    """
    ours = VllmParser("ours", (), refusal)
    add_all(ours, groups)
    vllms = VllmParser("vllm", (), refusal)
    add_vllms(vllms)
    own = {**OWN, **command.own}
    taken = [
        action
        for action in vllms.actions
        if action.option_strings and not refusal(action.dest) and action.dest != "help"
    ]
    for action in taken:  # the rest stands in vLLM's own help
        action.help = " ".join((action.help or "").split()).partition(". ")[0].removesuffix(".")
    by_flag = {flag: action for action in (*taken, *ours.actions) for flag in action.option_strings}
    chosen = [
        (group.flag(name), group.variable(name), type(field.default))
        for group in groups
        for name, field in group.declared().items()
        if isinstance(field.default, StrEnum)
    ]
    numbers = {
        (group.flag(name), group.variable(name)): _number(field)
        for group in groups
        for name, field in group.declared().items()
        if field.annotation in (int, float) and name not in group.variables
    }
    first = [("needed first", [by_flag[flag] for flag in command.first])]
    table = KnownFlags(
        prog=command.prog,
        help=_help(command, first, own),
        help_all=_help(command, _by_group(groups, ours, taken), own),
        flags=frozenset({*by_flag, *own, "-h"}),
        refused={name: reason for name in sorted(NAMES) if (reason := refusal(name))},
        choices={flag: [str(each) for each in kind] for flag, _, kind in chosen},
        variables={flag: variable for flag, variable, _ in chosen} | dict(numbers.keys()),
        numbers={flag: number for (flag, _), number in numbers.items()},
        values={
            flag: _MANY if action.nargs in ("+", "*") else 0
            for flag, action in by_flag.items()
            if action.nargs in (0, "+", "*")
        },
    )
    return table, _completed((*ours.actions, *taken), own)


def _number(field: FieldInfo) -> Number:
    bounds = {
        name: getattr(each, name)
        for each in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if getattr(each, name, None) is not None
    }
    return Number(whole=field.annotation is int, **bounds)


def _by_group(
    groups: Iterable[type[FlagSettings]], ours: VllmParser, vllms: list[argparse.Action]
) -> list[tuple[str, list[argparse.Action]]]:
    """Return all flags by title, groups of one title together; of a name that stands twice the
    first counts."""
    by_flag = {flag: action for action in ours.actions for flag in action.option_strings}
    titled: dict[str, list[argparse.Action]] = {}
    for group in groups:
        for name in group.declared():
            if (action := by_flag.get(group.flag(name))) is not None:
                titled.setdefault(group.flag_group, []).append(action)
    titled["vLLM's own"] = [each for each in vllms if not set(each.option_strings) & set(by_flag)]
    return list(titled.items())


def _help(
    command: Command, groups: Iterable[tuple[str, list[argparse.Action]]], own: dict[str, str]
) -> str:
    parser = argparse.ArgumentParser(
        usage=f"{command.prog} {command.usage}",
        description=command.about,
        add_help=False,
        formatter_class=lambda prog: _Formatter(prog, 2, 30, _WIDTH),
    )
    for title, actions in groups:
        group = parser.add_argument_group(title)
        for action in actions:
            _add_plain(group, action)
    answered = parser.add_argument_group("answered at once")
    for flag, text in own.items():
        answered.add_argument(flag, action="store_true", help=text)
    return parser.format_help().rstrip()


class _Formatter(argparse.HelpFormatter):
    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = self._format_args(action, "") if action.nargs != 0 else ""
        flags = [flag for flag in action.option_strings if not flag.startswith("--no-")]
        return " ".join(filter(None, [", ".join(flags), value]))


def _metavar(action: argparse.Action) -> str:
    """Return what help shows for a value. A long list of choices is left to completion."""
    shown = str(action.metavar or "")
    if choices := _choices(action):
        shown = "{" + ",".join(choices) + "}"
    if len(shown) > _MAX_METAVAR_LEN or shown.startswith("["):
        return "NAME"
    if shown:
        return shown
    if any(map(_FILE.search, action.option_strings)):
        return "FILE"
    if any(map(_DIRECTORY.search, action.option_strings)):
        return "DIRECTORY"
    return "N" if action.type in (int, float) else "TEXT"


def _add_plain(group: argparse._ArgumentGroup, action: argparse.Action) -> None:
    """Add an option that prints as another, which may be of any class."""
    text = " ".join((action.help or "").split())
    if action.nargs == 0:
        group.add_argument(*action.option_strings, action="store_true", help=text)
        return
    group.add_argument(
        *action.option_strings, nargs=action.nargs, metavar=_metavar(action), help=text
    )


def _completed(actions: Iterable[argparse.Action], own: dict[str, str]) -> dict[str, Completed]:
    shells = Completed(OWN["--completion"], choices=SHELLS)
    found = {flag: Completed(text, "nothing") for flag, text in own.items()} | {
        "--completion": shells
    }
    for action in actions:
        if action.help != argparse.SUPPRESS:
            found = {flag: _flag(action) for flag in action.option_strings} | found
    return found


def _flag(action: argparse.Action) -> Completed:
    text = " ".join((action.help or "").replace("%%", "%").split())
    text = re.sub(r"[^\w ,.;/()+-]", "", text)[:_MAX_HELP_LEN]
    if action.nargs == 0:
        return Completed(text, "nothing")
    if any(map(_FILE.search, action.option_strings)):
        return Completed(text, "file")
    if any(map(_DIRECTORY.search, action.option_strings)):
        return Completed(text, "directory")
    return Completed(text, choices=tuple(_choices(action)))


def _choices(action: argparse.Action) -> list[str]:
    """What an option may be, of ours as its help shows it; empty if that is no list."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    shown = re.fullmatch(r"\{(.+)\}", str(action.metavar))
    return shown[1].split(",") if shown else []
