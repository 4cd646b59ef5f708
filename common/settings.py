"""Flags that frontend and workers share, each with an environment twin.

A flag beats its environment variable, which beats the default. The environment is
read here, at start-up, and nowhere else.
"""

import argparse
import logging
import os
import tempfile
from pathlib import Path

from common.errors import ConfigurationError
from common.transfer.choice import TransferMode, parse_transfer_mode

ENV_PREFIX = "MMROUTER_"


def default_discovery_dir() -> Path:
    """A directory that only this user can write, the same for all their processes."""
    return Path(tempfile.gettempdir()) / f"mmrouter-{os.getuid()}"


def env_default(flag: str, default: str) -> str:
    """The environment's value for a flag, for example ``--log-level`` from
    ``MMROUTER_LOG_LEVEL``."""
    return os.environ.get(ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper(), default)


def env_path(flag: str) -> Path | None:
    """Like :func:`env_default`, for a file that need not be given."""
    value = env_default(flag, "")
    return Path(value) if value else None


def transfer_mode() -> TransferMode:
    """How processed media may travel, from ``DYNAMO_MM_TRANSFER`` and
    ``DYNAMO_DISABLE_NIXL_MM``, whose names operators know.

    Raises:
        ConfigurationError: an unknown value, or the two contradict each other.
    """
    wanted = os.environ.get("DYNAMO_MM_TRANSFER")
    disabled = os.environ.get("DYNAMO_DISABLE_NIXL_MM", "0").strip()
    if disabled not in ("", "0", "1"):
        raise ConfigurationError(f"DYNAMO_DISABLE_NIXL_MM is {disabled!r}; it must be 0 or 1")
    if disabled != "1":
        return parse_transfer_mode(wanted)
    if wanted:
        raise ConfigurationError(
            f"DYNAMO_DISABLE_NIXL_MM=1 turns transfer off, but DYNAMO_MM_TRANSFER is {wanted!r}"
        )
    return TransferMode.DISABLED


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that frontend and workers share."""
    parser.add_argument(
        "--discovery-dir",
        type=Path,
        default=Path(env_default("--discovery-dir", str(default_discovery_dir()))),
        help="directory in which workers publish their cards (default: %(default)s)",
    )
    parser.add_argument(
        "--fleet-key-file",
        type=Path,
        default=env_path("--fleet-key-file"),
        help="secret file of the fleet, from `python -m common.fleet_key new PATH`; with it "
        "workers and frontends encrypt what they say, and answer nobody else",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=float(env_default("--drain-timeout", "60")),
        help="seconds that requests may take to finish after SIGTERM (default: %(default)s)",
    )
    parser.add_argument(
        "--nvtx",
        action=argparse.BooleanOptionalAction,
        default=env_default("--nvtx", "0") == "1",
        help="emit NVTX ranges around the stages of a request",
    )
    parser.add_argument(
        "--log-level",
        default=env_default("--log-level", "info"),
        choices=["debug", "info", "warning", "error"],
        help="level of mmrouter's own log lines (default: %(default)s)",
    )


def configure_logging(level: str, process: str) -> None:
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
