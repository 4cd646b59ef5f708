"""Settings of every process: log, tracing, fleet key, shutdown; and the keys of a frontend."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from common.cli.flag_settings import FlagSettings
from common.errors import ConfigurationError
from common.fleet_key import FleetKey, read_lines
from common.observability.log_lines import LogFormat, LogLevel, LogSetup

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class ProcessSettings(FlagSettings):
    """Settings shared by frontends and workers."""

    flag_group: ClassVar[str] = "process"

    fleet_key_file: Path | None = Field(
        None,
        description="secret file of the fleet, from `mmrouter fleet-key new PATH`; with "
        "it workers and frontends encrypt their traffic, and reject all other peers",
    )
    drain_timeout_s: Seconds = Field(
        60.0, description="how long requests may take to finish after SIGTERM"
    )
    nvtx: bool = Field(False, description="emit NVTX ranges around the stages of a request")
    log_level: LogLevel = Field(
        LogLevel.INFO,
        description="level of log lines, as a flag or in the file vLLM's too, whose variable is "
        "VLLM_LOGGING_LEVEL",
    )

    log_format: LogFormat = Field(
        LogFormat.TEXT, description="log lines as text, or one JSON object each"
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        description="collector of OpenTelemetry to which spans of requests go, for example "
        "http://localhost:4317; at a worker the engine's too",
    )

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _names_one(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.strip():
            raise ValueError("it is empty, which would be OpenTelemetry's own default")
        return endpoint

    @field_validator("log_level", mode="before")
    @classmethod
    def _as_vllm_writes_it(cls, level: object) -> object:
        return level.lower() if isinstance(level, str) else level

    def fleet_key(self) -> FleetKey | None:
        """Read the fleet's key, None if there is none. Raises ConfigurationError."""
        return None if self.fleet_key_file is None else FleetKey.read(self.fleet_key_file)

    def log_setup(self, process: str) -> LogSetup:
        return LogSetup(self.log_level, self.log_format, process)


class KeySettings(FlagSettings):
    """API keys and admin keys. They stand here because the launcher reads them too."""

    flag_group: ClassVar[str] = "keys"

    api_key_file: Path | None = Field(
        None,
        description="file with one API key a line, in addition to --api-key; changes count within "
        "seconds",
    )
    isolate_api_keys: bool = Field(
        False,
        description="give every API key a cache_salt of its own, so that no key can find out by "
        "time which prompts and media another sent, and none gains from them",
    )
    admin_key_file: Path | None = Field(
        None,
        description="file with one key a line that opens /mmrouter/* and vLLM's management "
        "routes, and is followed too; without it they are open to clients on this host only",
    )


def read_keys(path: Path, what: str = "API") -> tuple[list[str], int]:
    """Return the keys of a file, one a line, and its mode; skip empty lines and ``#`` comments.

    Raises:
        ConfigurationError: it is unreadable, or has no key, which would admit everyone.
    """
    keys, mode = read_lines(path, f"the {what} keys in")
    if not keys:
        raise ConfigurationError(f"{path} holds no {what} key")
    return keys, mode
