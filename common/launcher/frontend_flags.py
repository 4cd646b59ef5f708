"""Flags of frontends that their clients must know."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from common.cli.command_line import CommandLine, value_of
from common.cli.process_settings import KeySettings, read_keys
from common.errors import ConfigurationError


@dataclass(frozen=True)
class Told:
    """Frontends' Unix socket, and an API key with its shell expression; empty if unused."""

    uds: str = ""
    key: tuple[str, str] = ("", "")


def told(line: CommandLine, option: str) -> Told:
    """Return what clients of these frontends need; ``option`` is where users set their flags.
    Raises ConfigurationError: a flag is the launcher's to set."""
    for flag in ("--host", "--port"):
        if value_of(flag, line.rest) is not None:
            raise ConfigurationError(
                f"{option} has {flag}, which is the same for all: say it beside, not there"
            )
    return Told(line.of_vllm("uds") or "", _key(line))


def _key(line: CommandLine) -> tuple[str, str]:
    """Return an API key, and a shell expression for it that does not show it."""
    file: Path | None = KeySettings.from_args(line.ours).api_key_file
    if file is not None:
        pattern = shlex.quote("^[^#[:space:]]")
        return read_keys(file)[0], f"$(grep -m 1 {pattern} {shlex.quote(str(file.resolve()))})"
    if given := line.of_vllm("api-key"):
        return given, "$API_KEY"
    variable = os.environ.get("VLLM_API_KEY", "")
    return variable, "$VLLM_API_KEY" if variable else ""
