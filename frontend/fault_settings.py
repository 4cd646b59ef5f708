"""The flags that say how long to wait and how often to try again, each with a twin in
the environment: ``--migration-limit`` is ``MMROUTER_MIGRATION_LIMIT``.
"""

import argparse
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigurationError
from common.settings import env_default

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class FaultSettings(BaseModel):
    """What to do about workers that are lost or slow."""

    model_config = ConfigDict(frozen=True)

    migration_limit: int = Field(
        3, ge=0, description="how often one request may be given to another worker; 0 never"
    )
    retry_budget: float = Field(
        0.5,
        ge=0.0,
        allow_inf_nan=False,
        description="how many requests may be given to another worker, as a fraction of the "
        "recent ones, so that retries can't become the overload; a few are always allowed",
    )
    request_timeout_s: Seconds = Field(
        0.0,
        description="seconds that a request may take once its prompt is processed; 0 for any time",
    )
    output_timeout_s: Seconds = Field(
        0.0,
        description="seconds without any output after which a request is taken from a worker "
        "that is alive otherwise, time in its queue included; 0 for any time",
    )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add a flag per field to a parser."""
        group = parser.add_argument_group("faults")
        for name, field in cls.model_fields.items():
            group.add_argument(
                flag(name),
                dest=name,
                metavar="VALUE",
                default=env_default(flag(name), str(field.default)),
                help=f"{field.description} (default {field.default})",
            )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Settings from parsed flags.

        Raises:
            ConfigurationError: a value is unusable; the message names its flag.
        """
        values = {name: getattr(args, name) for name in cls.model_fields}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise ConfigurationError(
                f"{flag(name)}={values[name]!r} is unusable: {first['msg']}"
            ) from error


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.removesuffix("_s").replace("_", "-")
