"""Flags of frontends that their clients must know."""

import argparse
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigurationError
from common.fleet_key import read_lines

READ = ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")
"""Files that must be there."""


@dataclass(frozen=True)
class Told:
    """Frontends' Unix socket, and an API key with its shell expression; empty if unused."""

    uds: str = ""
    key: tuple[str, str] = ("", "")


def told(arguments: list[str], option: str) -> Told:
    """Read frontends' flags and their file of ``--config``; ``option`` is where users set them.
    Raises ConfigurationError: a flag is the launcher's to set."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for flag in ("--host", "--port", "--uds", "--api-key-file", "--config", *READ):
        parser.add_argument(flag, flag.replace("-", "_").replace("__", "--"))
    parser.add_argument("--api-key", "--api_key", nargs="*")
    found, _ = parser.parse_known_args(arguments)
    for name in ("host", "port"):
        if getattr(found, name) is not None:
            raise ConfigurationError(
                f"{option} has --{name}, which is the same for all: say it beside, not there"
            )
    config = found.config or os.environ.get("MMROUTER_CONFIG")
    file = read_config(Path(config)) if config else {}
    for flag in READ:
        name = flag.removeprefix("--")
        place = getattr(found, name.replace("-", "_")) or file.get(name)
        if place and not os.access(str(place), os.R_OK):
            raise ConfigurationError(f"{flag}: {place} can't be read")
    key_file = (
        found.api_key_file
        or os.environ.get("MMROUTER_API_KEY_FILE")
        or str(file.get("api-key-file", ""))
    )
    uds = found.uds or str(file.get("uds", ""))
    return Told(uds, key(found.api_key or file.get("api-key"), key_file))


def read_config(path: Path) -> dict[str, object]:
    """Return the file's keys, with dashes; none if invalid, which the frontend reports."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"--config {path} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    pairs = values.items() if isinstance(values, dict) else ()
    return {str(name).replace("_", "-"): value for name, value in pairs}


def key(given: object, file: str) -> tuple[str, str]:
    """Return an API key, and a shell expression for it that does not show it."""
    keys = [given] if isinstance(given, str) else list(given) if isinstance(given, list) else []
    if file and (kept := read_lines(Path(file), "the API keys in")[0]):
        pattern = shlex.quote("^[^#[:space:]]")
        place = shlex.quote(str(Path(file).resolve()))
        return kept[0], f"$(grep -m 1 {pattern} {place})"
    if keys:
        return str(keys[0]), "$API_KEY"
    variable = os.environ.get("VLLM_API_KEY", "")
    return variable, "$VLLM_API_KEY" if variable else ""
