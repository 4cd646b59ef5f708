"""Settings of which every field is a flag with a twin in the environment.

``--router-decode-weight`` is ``MMROUTER_ROUTER_DECODE_WEIGHT``: the flag wins over the
environment, and that over the default. Units are left out of both: ``timeout_s`` is
``--timeout``.
"""

import argparse
import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from common.errors import ConfigurationError
from common.settings import ENV_PREFIX


class FlagSettings(BaseModel):
    """A group of flags; each field's description is its help.

    Attributes:
        flag_group: title of the group in the help.
        flag_prefix: what the flags begin with, ``router-`` for example.
        not_flags: fields that are set by other means.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    flag_group: ClassVar[str]
    flag_prefix: ClassVar[str] = ""
    not_flags: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def flag(cls, field: str) -> str:
        """The command-line flag of a field."""
        return "--" + cls.flag_prefix + field.removesuffix("_s").replace("_", "-")

    @classmethod
    def variable(cls, field: str) -> str:
        """The environment variable of a field."""
        return ENV_PREFIX + cls.flag(field).removeprefix("--").replace("-", "_").upper()

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field to a parser."""
        group = parser.add_argument_group(cls.flag_group)
        for name, field in cls._flag_fields().items():
            options: dict[str, Any] = {"metavar": "VALUE"}
            default = field.default
            if field.annotation is bool:
                options = {"action": argparse.BooleanOptionalAction}
            elif isinstance(default, StrEnum):
                options = {"choices": [choice.value for choice in type(default)]}
                default = default.value
            group.add_argument(
                cls.flag(name),
                dest=cls._destination(name),
                default=None,
                help=f"{field.description} (default {default}; {cls.variable(name)})",
                **options,
            )

    @classmethod
    def from_args(
        cls,
        args: argparse.Namespace,
        environ: Mapping[str, str] | None = None,
        others: Mapping[str, tuple[str, object]] | None = None,
    ) -> Self:
        """Settings from parsed flags, then the environment, then defaults.

        Args:
            args: what a parser with :meth:`add_arguments` returned.
            environ: ``os.environ`` unless given.
            others: fields that are no flags of ours: where each value stood, and the value.

        Raises:
            ConfigurationError: a value is unusable; the message names where it stood.
        """
        environ = os.environ if environ is None else environ
        found = dict(others or {})
        for name in cls._flag_fields():
            given = getattr(args, cls._destination(name))
            if given is not None:
                found[name] = cls.flag(name), given
            elif (variable := cls.variable(name)) in environ:
                found[name] = variable, environ[variable]
        try:
            return cls.model_validate({name: value for name, (_, value) in found.items()})
        except ValidationError as error:
            first = error.errors()[0]
            source, value = found[str(first["loc"][0])]
            raise ConfigurationError(f"{source}={value!r} is unusable: {first['msg']}") from error

    @classmethod
    def _flag_fields(cls) -> dict[str, FieldInfo]:
        return {
            name: field for name, field in cls.model_fields.items() if name not in cls.not_flags
        }

    @classmethod
    def _destination(cls, field: str) -> str:
        return cls.flag_prefix.replace("-", "_") + field
