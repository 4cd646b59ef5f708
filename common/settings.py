"""Flags that frontend and workers share, each with an environment twin.

A flag beats its environment variable, which beats the default. The environment is
read here, at start-up, and nowhere else.
"""

import argparse
import logging
import math
import os
import re
import stat
import tempfile
from pathlib import Path

from common.discovery.base import Discovery
from common.discovery.file import FileDiscovery
from common.discovery.urls import BACKENDS, open_discovery
from common.errors import ConfigurationError
from common.transfer.choice import TransferMode, parse_transfer_mode
from common.transfer.nixl_network import NixlNetwork, narrowed

ENV_PREFIX = "MMROUTER_"
LOG_LEVELS = ("debug", "info", "warning", "error")


def default_discovery_dir() -> Path:
    """The same for all processes of this user: in their runtime directory if they have one,
    else in the temporary directory. Whoever opens it makes sure that it is theirs.
    """
    user = os.geteuid()
    for runtime in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"):
        # Under sudo the variable may still name another user's.
        if Path(runtime).is_absolute() and _belongs_to(Path(runtime), user):
            return Path(runtime) / "mmrouter"
    return Path(tempfile.gettempdir()) / f"mmrouter-{user}"


def _belongs_to(path: Path, user: int) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == user


def _variable(flag: str) -> str:
    return ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def env_default(flag: str, default: str) -> str:
    """The environment's value for a flag, for example ``--log-level`` from
    ``MMROUTER_LOG_LEVEL``."""
    return os.environ.get(_variable(flag), default)


def env_switch(parser: argparse.ArgumentParser, flag: str) -> bool:
    """Whether the environment sets a flag that is on or off; exits with status 2 and a sentence
    if it says neither: ``true`` must not be taken for off."""
    value = env_default(flag, "0")
    if value not in ("0", "1", ""):
        parser.error(f"{_variable(flag)} is {value!r}; it must be 0 or 1")
    return value == "1"


def amount(text: str) -> float:
    """The value of a flag that is a finite number from 0 on. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 on")
    return value


def _log_level(text: str) -> str:
    if text not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(LOG_LEVELS)}")
    return text


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
    directory = str(default_discovery_dir()).replace("%", "%%")
    parser.add_argument(
        "--discovery",
        metavar="URL",
        help="where workers publish their cards: "
        + " or ".join(backend.form for backend in BACKENDS.values()),
    )
    parser.add_argument(
        "--discovery-dir",
        type=Path,
        help=f"the same for a directory, without a URL (default: {directory})",
    )
    parser.add_argument(
        "--fleet-key-file",
        type=Path,
        default=env_path("--fleet-key-file"),
        help="secret file of the fleet, from `python -m common.fleet_key new PATH`; with it "
        "workers and frontends encrypt what they say, and answer nobody else",
    )
    parser.add_argument(
        "--nixl-interface",
        default=env_default("--nixl-interface", ""),
        metavar="DEVICE",
        help="network device over which NIXL may reach other hosts, as UCX names it: mlx5_0:1 "
        "for RDMA, eth0 for TCP, several with commas between them (default: none, so NIXL stays "
        "on this host)",
    )
    parser.add_argument(
        "--nixl-allow-tcp",
        action=argparse.BooleanOptionalAction,
        default=env_switch(parser, "--nixl-allow-tcp"),
        help="let NIXL use TCP, over loopback unless --nixl-interface says otherwise. TCP does "
        "not protect memory: whoever reaches the port can read and overwrite the memory of the "
        "process that serves the arena, and of the one that reads for a worker. These hold "
        "nothing else, and what was overwritten is found out; but media can be read by all on "
        "that network",
    )
    parser.add_argument(
        "--drain-timeout",
        type=amount,
        default=env_default("--drain-timeout", "60"),
        help="seconds that requests may take to finish after SIGTERM (default: %(default)s)",
    )
    parser.add_argument(
        "--nvtx",
        action=argparse.BooleanOptionalAction,
        default=env_switch(parser, "--nvtx"),
        help="emit NVTX ranges around the stages of a request",
    )
    parser.add_argument(
        "--log-level",
        type=_log_level,
        default=env_default("--log-level", "info"),
        metavar="LEVEL",
        help=f"level of mmrouter's own log lines: {', '.join(LOG_LEVELS)} (default: %(default)s)",
    )


def discovery(args: argparse.Namespace) -> Discovery:
    """Where cards are kept, from ``--discovery`` or ``--discovery-dir``, else from their twins.

    Raises:
        ConfigurationError: both are given, or the URL can't be used.
    """
    url: str | None = args.discovery
    directory: Path | None = args.discovery_dir
    given = "--discovery", "--discovery-dir"
    if url is None and directory is None:
        url, directory = env_default("--discovery", "") or None, env_path("--discovery-dir")
        given = _variable("--discovery"), _variable("--discovery-dir")
    if url is not None and directory is not None:
        raise ConfigurationError(f"{' and '.join(given)} both say where cards are: give one")
    if url is not None:
        return open_discovery(url)
    return FileDiscovery(directory or default_discovery_dir())


def nixl_network(args: argparse.Namespace) -> NixlNetwork:
    """Over which networks NIXL may go, from our flags and ``UCX_TLS``.

    Raises:
        ConfigurationError: it can't go over these.
    """
    interface: str = args.nixl_interface
    if interface and (not re.fullmatch(r"[\w.:,-]{1,255}", interface) or interface == "all"):
        raise ConfigurationError(f"--nixl-interface is {interface!r}; it must name devices")
    network = NixlNetwork(
        interface or None, args.nixl_allow_tcp, narrowed(os.environ.get("UCX_TLS"))
    )
    network.transports()
    return network


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
