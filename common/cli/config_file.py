"""The YAML file that ``--config`` names: its keys are flags without their dashes in front."""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import yaml

from common.errors import ConfigurationError

EMPTY: Final = "is empty: leave it out if that is not meant"
"""What is said of a flag or a key whose text is a variable of a shell that is not set."""


@dataclass(frozen=True)
class ConfigFile:
    """What a file says.

    Attributes:
        path: as it was given.
        values: by key, with dashes for underscores; None where nothing stands behind the key.
    """

    path: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ConfigurationError: it can't be read, or does not consist of keys and values.
        """
        try:
            text = path.read_text()
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            values = yaml.safe_load(text)
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
        # A mapping keeps the last of several; the tree has them all.
        written = Counter(_with_dashes(str(key.value)) for key, _ in root.value)
        if twice := [key for key, times in written.items() if times > 1]:
            raise ConfigurationError(f"{path}: {twice[0]} stands there twice")
        return cls(path, {_with_dashes(key): value for key, value in values.items()})


def _with_dashes(key: str) -> str:
    """vLLM takes both for its flags. What follows a dot is the name of a field."""
    name, dot, field = key.partition(".")
    return name.replace("_", "-") + dot + field


def is_empty(value: object) -> bool:
    """Whether it is text with nothing in it."""
    return isinstance(value, str) and not value.strip()


def unknown(name: str, known: Iterable[str]) -> str:
    """A sentence about a name that nobody knows, with the nearest that is known."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")
