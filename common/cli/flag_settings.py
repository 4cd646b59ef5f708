"""Declare a setting once: name, type, default, unit, range and help.

``--router-stall`` is ``MMROUTER_ROUTER_STALL``, and ``router-stall`` in the YAML file of
``--config``. Precedence: flag, environment variable, file, default. An empty variable or key counts
as unset; an empty path is refused. A field's name ends with its unit; flags omit seconds:
``timeout_s`` is ``--timeout``.
"""

import argparse
import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self, TypeAlias, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from common.errors import ConfigurationError

EMPTY: Final = "is empty: leave it out if that is not meant"
"""Error for a flag or key set to an empty text, such as an unset shell variable."""


class _Loader(yaml.SafeLoader):
    """YAML in which a date is text: no flag takes one, but names of models may look so."""


# In a class of its own, since lm-format-enforcer changes this for all users of PyYAML.
_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file by key, with dashes for underscores; None for a key without a value."""

    path: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises ConfigurationError: it can't be read, or is not a YAML mapping."""
        try:
            text = path.read_text()
            root = yaml.compose(text, Loader=_Loader)
            values = yaml.load(text, Loader=_Loader)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} can't be read: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigurationError(
                f"{path} is no YAML: {' '.join(str(error).split())}"
            ) from error
        if values is None:
            return cls(path, {})
        if not isinstance(values, dict):
            raise ConfigurationError(f"{path} must have a key for each flag, as in `port: 8000`")
        for key in values:
            if not isinstance(key, str):
                raise ConfigurationError(f"{path}: the key {key!r} is no text")
        # A mapping keeps the last of several equal keys; the tree has them all.
        written = Counter(_with_dashes(str(key.value)) for key, _ in root.value)
        if twice := [key for key, times in written.items() if times > 1]:
            raise ConfigurationError(f"{path}: {twice[0]} stands there twice")
        return cls(path, {_with_dashes(key): value for key, value in values.items()})


def _with_dashes(key: str) -> str:
    """Replace underscores by dashes, as vLLM does; keep the field name after a dot."""
    name, dot, field = key.partition(".")
    return name.replace("_", "-") + dot + field


def is_empty(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


def unknown(name: str, known: Iterable[str]) -> str:
    """Return a sentence about an unknown name, with the nearest known one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")


_URL_SECRET: Final = re.compile(r"(?<=//)[^/?#]*@|(?<=password=)[^&#]*")


def without_secrets(url: str) -> str:
    """Mask a password in a URL."""
    return _URL_SECRET.sub("***", url)


ENV_PREFIX: Final = "MMROUTER_"

_UNITS: Final = {
    "s": "s",
    "mb": "MiB",
    "gb": "GiB",
    "pixels": "pixels",
    "megapixels": "megapixels",
    "tokens": "tokens",
    "blocks": "blocks",
}
"""By the last word of a field's name."""

Layer: TypeAlias = Literal["flag", "environment", "file"]
"""Sources of a setting, in order of precedence."""


class Given(NamedTuple):
    """A value that the user set, and its place: a flag, a variable, or a file and its key."""

    layer: Layer
    where: str
    value: object


class FlagSettings(BaseModel):
    """Group of settings; each field's description is its help.

    Attributes:
        flag_prefix: prefix of the flags, for example ``router-``.
        not_flags: fields that are set by other means.
        variables: fields without a flag, and the environment variable of each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    flag_group: ClassVar[str]
    flag_prefix: ClassVar[str] = ""
    not_flags: ClassVar[frozenset[str]] = frozenset()
    variables: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def flag(cls, field: str) -> str:
        return "--" + cls.flag_prefix + field.removesuffix("_s").replace("_", "-")

    @classmethod
    def variable(cls, field: str) -> str:
        own_name = ENV_PREFIX + cls.flag(field).removeprefix("--").replace("-", "_").upper()
        return cls.variables.get(field, own_name)

    @classmethod
    def declared(cls) -> dict[str, FieldInfo]:
        """Return the fields that a user may set."""
        return {
            name: field for name, field in cls.model_fields.items() if name not in cls.not_flags
        }

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(cls.flag_group)
        for name, field in cls.declared().items():
            if name in cls.variables:
                continue
            options: dict[str, Any] = {"metavar": _metavar(name, field)}
            if field.annotation is bool:
                options = {"action": argparse.BooleanOptionalAction}
            elif isinstance(field.default, StrEnum):
                options = {"metavar": f"{{{','.join(type(field.default))}}}"}
            default = default_of(name, field)
            facts = "; ".join(filter(None, (default and f"default {default}", cls.variable(name))))
            group.add_argument(
                cls.flag(name),
                dest=cls._destination(name),
                default=None,
                help=f"{field.description} ({facts})".replace("%", "%%"),
                **options,
            )

    @classmethod
    def from_args(
        cls,
        args: argparse.Namespace,
        environ: Mapping[str, str] | None = None,
        others: Mapping[str, tuple[str, object]] | None = None,
    ) -> Self:
        """Build settings from flags, environment, file and defaults, in this precedence.

        ``args`` has the file as ``config_file``; ``others`` maps fields without a flag to source
        and value. Raises ConfigurationError: names the source.
        """
        given = cls.given(args, environ)
        found = dict(others or {}) | {name: (one.where, one.value) for name, one in given.items()}
        try:
            return cls.model_validate({name: value for name, (_, value) in found.items()})
        except ValidationError as error:
            raise ConfigurationError(cls._sentence(error, found)) from error

    @classmethod
    def given(
        cls, args: argparse.Namespace, environ: Mapping[str, str] | None = None
    ) -> dict[str, Given]:
        """Return the value that wins for each field. Raises ConfigurationError: an empty path, or a
        bare YAML switch for a field that is none."""
        environ = os.environ if environ is None else environ
        file: ConfigFile | None = getattr(args, "config_file", None)
        found: dict[str, Given] = {}
        for layer in (cls._flags(args), cls._variables(environ), cls._in_file(file)):
            for name, one in layer.items():
                # An empty path would be the working directory.
                declared = cls.declared()[name].annotation
                if is_empty(one.value) and Path in (declared, *get_args(declared)):
                    raise ConfigurationError(f"{one.where} {EMPTY}")
            found = layer | found
        return found

    @classmethod
    def _flags(cls, args: argparse.Namespace) -> dict[str, Given]:
        values = {name: getattr(args, cls._destination(name), None) for name in cls.declared()}
        return {
            name: Given("flag", cls.flag(name), value)
            for name, value in values.items()
            if value is not None
        }

    @classmethod
    def _variables(cls, environ: Mapping[str, str]) -> dict[str, Given]:
        variables = {name: cls.variable(name) for name in cls.declared()}
        return {
            name: Given("environment", variable, value)
            for name, variable in variables.items()
            if (value := environ.get(variable))
        }

    @classmethod
    def _in_file(cls, file: ConfigFile | None) -> dict[str, Given]:
        found: dict[str, Given] = {}
        for name, field in cls.declared().items():
            key = cls.flag(name).removeprefix("--")
            value = file.values.get(key) if file and name not in cls.variables else None
            if value is None or file is None:
                continue
            if isinstance(value, bool) and field.annotation is not bool:
                # Pydantic would take it for 0 or 1, and YAML turns a bare `off` into a boolean.
                said = str(value).lower()
                raise ConfigurationError(
                    f"{file.path}: {key}={said} is unusable: it is no switch, so put it in quotes "
                    "if that is meant"
                )
            found[name] = Given("file", f"{file.path}: {key}", value)
        return found

    @classmethod
    def shown(cls, field: str, value: object) -> str:
        """Return a value as a message may show it."""
        return repr(value)

    @classmethod
    def _sentence(cls, error: ValidationError, found: Mapping[str, tuple[str, object]]) -> str:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            return reason
        field = str(first["loc"][0])
        source, value = found[field]
        return f"{source}={cls.shown(field, value)} is unusable: {reason}"

    @classmethod
    def _destination(cls, field: str) -> str:
        return cls.flag_prefix.replace("-", "_") + field


def add_all(parser: argparse.ArgumentParser, groups: Iterable[type[FlagSettings]]) -> None:
    for group in groups:
        group.add_arguments(parser)


def _metavar(name: str, field: FieldInfo) -> str:
    """Return the metavar of a value: its unit if it has one."""
    if (unit := unit_of(name)) != "":
        return "SECONDS" if unit == "s" else unit
    kinds = (field.annotation, *get_args(field.annotation))
    if Path in kinds:
        return "FILE"
    return "N" if int in kinds or float in kinds else "TEXT"


def unit_of(field: str) -> str:
    """Return the unit in a field's name; empty if it has none."""
    return _UNITS.get(field.rpartition("_")[2], "")


def default_of(name: str, field: FieldInfo) -> str:
    """Return a default with its unit; empty if there is none, or the machine decides."""
    default = None if field.default_factory is not None else field.get_default()
    match default:
        case None:
            return ""
        case bool():
            return "on" if default else "off"
        case float():
            return f"{plain_number(default)} {unit_of(name)}".rstrip()
        case _:
            return f"{default} {unit_of(name)}".rstrip()


def plain_number(value: Any) -> str:
    """Format a number exactly, without a trailing ``.0``."""
    return str(int(value)) if value == int(value) else str(value)
