"""Where cards are kept: by a URL, whose scheme says which kind of place it is, or a directory."""

import os
import shlex
import stat
import tempfile
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from common.cli.flag_settings import FlagSettings
from common.cli.settings_summary import without_secrets
from common.discovery.base import Discovery
from common.discovery.etcd import EtcdDiscovery
from common.discovery.file import FileDiscovery
from common.discovery.kubernetes import KubernetesDiscovery
from common.errors import ConfigurationError, DiscoveryError

BACKENDS: Final[dict[str, type[Discovery]]] = {
    "file": FileDiscovery,
    "etcd": EtcdDiscovery,
    "kubernetes": KubernetesDiscovery,
}
"""Every kind of discovery, by the scheme of its URLs."""


def open_discovery(url: str) -> Discovery:
    """The place that a URL names. Nothing is touched yet.

    Raises ConfigurationError: the scheme is unknown, or the rest means nothing to its backend.
    """
    forms = " or ".join(backend.form for backend in BACKENDS.values())
    try:
        parts = urlsplit(url)
        backend = BACKENDS.get(parts.scheme)
        if backend is None:
            raise ConfigurationError(f"no discovery has the scheme {parts.scheme!r}")
        return backend.from_url(parts)
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(
            f"discovery can't be at {without_secrets(url)!r}, it must be at {forms}: {error}"
        ) from error


def default_discovery_dir() -> Path:
    """The same for all processes of this user: in their runtime directory if they have one,
    else in the temporary directory. Whoever opens it makes sure that it is theirs."""
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


class DiscoverySettings(FlagSettings):
    """The same for frontends and workers of one fleet."""

    flag_group: ClassVar[str] = "discovery"
    alternatives: ClassVar[frozenset[str]] = frozenset({"discovery", "discovery_dir"})

    discovery: str | None = Field(
        None,
        description="URL of where workers publish their cards: "
        + " or ".join(backend.form for backend in BACKENDS.values()),
    )
    discovery_dir: Path = Field(
        default_factory=default_discovery_dir,
        description="the same for a directory that exists, without a URL; unless given, mmrouter "
        "in the user's runtime directory, or mmrouter-UID in the temporary one, which is made",
    )

    @field_validator("discovery")
    @classmethod
    def _usable(cls, url: str | None) -> str | None:
        if url is not None:
            try:
                open_discovery(url)
            except ConfigurationError as error:
                raise ValueError(str(error)) from error
        return url

    @classmethod
    def shown(cls, field: str, value: object) -> str:
        return without_secrets(super().shown(field, value))

    def open(self) -> Discovery:
        """Return the place itself. Nothing is touched yet."""
        if self.discovery is not None:
            return open_discovery(self.discovery)
        return FileDiscovery(self.discovery_dir)


def check_place(place: Discovery) -> None:
    """Refuse a directory that was named and is not there. It is not made: its name may be a slip,
    and the other processes of the fleet would never be found in it.

    Raises:
        DiscoveryError: says what to do.
    """
    if not isinstance(place, FileDiscovery) or place.directory == default_discovery_dir():
        return
    if not os.path.lexists(place.directory):
        raise DiscoveryError(
            f"there is no directory {place} for the workers' cards: check its name, or make it "
            f"with `mkdir -p -m 700 {shlex.quote(str(place))}`"
        )
