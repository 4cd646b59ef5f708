"""What every process of the fleet is told: its log, its trace, its key, its way out."""

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from common.flag_settings import FlagSettings
from common.fleet_key import FleetKey

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class LogLevel(StrEnum):
    """Of log lines, as vLLM has them too."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class ProcessSettings(FlagSettings):
    """Shared by frontends and workers."""

    flag_group: ClassVar[str] = "process"

    fleet_key_file: Path | None = Field(
        None,
        description="secret file of the fleet, from `python -m common.fleet_key new PATH`; with "
        "it workers and frontends encrypt what they say, and answer nobody else",
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

    @field_validator("log_level", mode="before")
    @classmethod
    def _as_vllm_writes_it(cls, level: object) -> object:
        return level.lower() if isinstance(level, str) else level

    def fleet_key(self) -> FleetKey | None:
        """The fleet's key, None if it has none.

        Raises:
            ConfigurationError: the file can't be used.
        """
        return None if self.fleet_key_file is None else FleetKey.read(self.fleet_key_file)


def configure_logging(level: LogLevel, process: str) -> None:
    """Send our log lines to stderr, each naming the process it comes from."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(
            f"%(levelname)s %(asctime)s [{process}] %(name)s: %(message)s", "%H:%M:%S"
        )
    )
    for package in ("common", "frontend", "backend_worker", "mmrouter"):
        logger = logging.getLogger(package)
        logger.setLevel(level.upper())
        logger.addHandler(handler)
        logger.propagate = False
