"""Log the effective settings and their sources at start, without secrets."""

import dataclasses
import logging
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final

from common.cli.flag_settings import FlagSettings, Given, unit_of, without_secrets
from common.cli.known_flags import version_line
from common.cli.vllm_command_line import SECRETS
from common.vllm_compat.preflight import platform_name

_HOLDS_SECRET: Final = re.compile(r"key|token|secret|password|credential|auth", re.IGNORECASE)
"""In the names of fields of structured arguments, if their values are text."""

LONGEST: Final = 300  # characters of a value of vLLM's


def log_settings(logger: logging.Logger, lines: Iterable[str]) -> None:
    logger.info("%s, platform of vLLM: %s", version_line(), platform_name())
    for line in filter(None, lines):
        logger.info("in force, %s", line)


def summary(
    ours: Namespace,
    groups: Iterable[type[FlagSettings]],
    vllms: Mapping[str, Given],
    defaults: Mapping[str, object],
) -> list[str]:
    """Return a line per group of settings, and one for vLLM; empty if nothing is in force. Raises
    ConfigurationError."""
    lines = [_group(group, ours) for group in groups]
    given = [
        f"{_key(name)}={'***' if name in SECRETS else _short(shown(one.value))} ({one.layer})"
        for name, one in vllms.items()
    ]
    left = [f"{_key(name)}={shown(value)}" for name, value in defaults.items() if name not in vllms]
    lines.append(_line("vLLM", given, left))
    return lines


def _group(group: type[FlagSettings], ours: Namespace) -> str:
    given = group.given(ours)
    made = group.from_args(ours)
    said, left = [], []
    for name in group.declared():
        where = group.variable(name) if name in group.variables else group.flag(name)[2:]
        value = getattr(made, name)
        unit = unit_of(name) if isinstance(value, int | float) else ""
        text = f"{where}={shown(value)}{unit and ' ' + unit}"
        if name in given:
            said.append(f"{text} ({given[name].layer})")
        elif value is not None:
            left.append(text)
    return _line(group.flag_group, said, left)


def _line(name: str, given: list[str], defaults: list[str]) -> str:
    parts = [", ".join(given), f"by default {', '.join(defaults)}" if defaults else ""]
    said = "; ".join(filter(None, parts))
    return said and f"{name}: {said}"


def shown(value: object, name: str = "") -> str:
    """Format a value for a log; a field name that suggests a secret masks it."""
    match value:
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}" if float(f"{value:g}") == value else str(value)
        case Enum():
            return str(value.value)
        case Mapping():
            fields = (f"{key}: {shown(one, str(key))}" for key, one in value.items())
            return f"{{{', '.join(fields)}}}"
        case list() | tuple() | set() | frozenset():
            return f"[{', '.join(shown(one, name) for one in value)}]"
        case _ if dataclasses.is_dataclass(value):
            known = dataclasses.fields(value)
            said = {one.name: getattr(value, one.name) for one in known}
            set_by = {one.name for one in known if said[one.name] not in (None, one.default)}
            return shown({name: said[name] for name in said if name in set_by})
        case str() if _HOLDS_SECRET.search(name):
            return "***"
        case _:
            return without_secrets(str(value))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _key(name: str) -> str:
    return name.replace("_", "-")
