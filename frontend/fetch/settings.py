"""The flags of media loading, each with a twin in the environment.

``--media-max-mb`` is ``MMROUTER_MEDIA_MAX_MB``: the flag wins over the environment, and
that over the default. vLLM's own two flags on where media may come from hold as well.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from common.errors import ConfigurationError
from common.settings import ENV_PREFIX
from frontend.fetch.policy import FetchPolicy

_FROM_VLLM = {
    "allowed_domains": "allowed_media_domains",
    "local_root": "allowed_local_media_path",
}


class MediaSettings(FetchPolicy):
    """The policy, and how much is kept."""

    cache_mb: float = Field(
        256.0,
        ge=0.0,
        allow_inf_nan=False,
        description="memory for media kept decoded, so that a repeated one needs no decoding, "
        "in MiB; 0 keeps none",
    )

    @property
    def cache_bytes(self) -> int:
        """Budget of the cache in bytes."""
        return int(self.cache_mb * 2**20)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one ``--media-…`` flag per field to a parser."""
        group = parser.add_argument_group("media")
        for name, field in cls._own_fields().items():
            options: dict[str, Any] = {"metavar": "VALUE"}
            if field.annotation is bool:
                options = {"action": argparse.BooleanOptionalAction}
            group.add_argument(
                flag(name),
                dest=f"media_{name}",
                default=None,
                help=f"{field.description} (default {field.default}; {variable(name)})",
                **options,
            )

    @classmethod
    def from_args(
        cls,
        args: argparse.Namespace,
        serve: argparse.Namespace,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """Settings from parsed flags, then the environment, then defaults.

        Args:
            args: what a parser with :meth:`add_arguments` returned.
            serve: vLLM's API server arguments.
            environ: ``os.environ`` unless given.

        Raises:
            ConfigurationError: a value is unusable; the message names where it stood.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name in cls._own_fields():
            given = getattr(args, f"media_{name}")
            if given is not None:
                values[name], sources[name] = given, flag(name)
            elif variable(name) in environ:
                values[name], sources[name] = environ[variable(name)], variable(name)
        for name, theirs in _FROM_VLLM.items():
            given = getattr(serve, theirs)
            if given:
                values[name], sources[name] = given, "--" + theirs.replace("_", "-")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise ConfigurationError(
                f"{sources[name]}={values[name]!r} is unusable: {first['msg']}"
            ) from error

    @classmethod
    def _own_fields(cls) -> dict[str, FieldInfo]:
        return {name: field for name, field in cls.model_fields.items() if name not in _FROM_VLLM}


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--media-" + name.removesuffix("_s").replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a field."""
    return f"{ENV_PREFIX}MEDIA_" + name.removesuffix("_s").upper()
