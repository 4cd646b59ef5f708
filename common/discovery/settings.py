"""Choose where cards are kept: a directory, or a URL's scheme."""

import os
import shlex
import stat
import tempfile
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from common.cli.flag_settings import FlagSettings, without_secrets
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

_FORMS: Final = f"a directory or {' or '.join(each.form for each in BACKENDS.values())}"


def open_discovery(place: str) -> Discovery:
    """Open a place by its URL, or the path of a directory, without side effects. Raises
    ConfigurationError: the scheme is unknown, or its backend refuses the rest."""
    try:
        if "://" not in place:
            scheme, colon, _ = place.partition(":")
            if not place.strip() or "\0" in place or (colon and scheme in BACKENDS):
                raise ConfigurationError("it names no directory")
            return FileDiscovery(Path(place))
        parts = urlsplit(place)
        backend = BACKENDS.get(parts.scheme)
        if backend is None:
            raise ConfigurationError(f"no discovery has the scheme {parts.scheme!r}")
        return backend.from_url(parts)
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(
            f"discovery can't be at {without_secrets(place)!r}, it must be at {_FORMS}: {error}"
        ) from error


def default_discovery_dir() -> Path:
    """Return a directory shared by all processes of this user, in the runtime or the temporary
    directory. The opener checks its owner."""
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

    discovery: str = Field(
        default_factory=lambda: str(default_discovery_dir()),
        description=f"where workers publish their cards: {_FORMS}. A directory must exist; unless "
        "given, mmrouter in the user's runtime directory, or mmrouter-UID in the temporary one, is "
        "made",
    )

    @field_validator("discovery")
    @classmethod
    def _usable(cls, place: str) -> str:
        try:
            open_discovery(place)
        except ConfigurationError as error:
            raise ValueError(str(error)) from error
        return place

    @classmethod
    def shown(cls, field: str, value: object) -> str:
        return without_secrets(super().shown(field, value))

    def open(self) -> Discovery:
        return open_discovery(self.discovery)


def check_place(place: Discovery) -> None:
    """Raise DiscoveryError if a named directory is missing, or no host of etcd is known. A mistyped
    directory is not created: the fleet's other processes would never use it."""
    if isinstance(place, EtcdDiscovery):
        place.check_names()
    if not isinstance(place, FileDiscovery) or place.directory == default_discovery_dir():
        return
    if not place.directory.is_dir():
        raise DiscoveryError(
            f"there is no directory {place} for the workers' cards: check its name, or make it "
            f"with `mkdir -p -m 700 {shlex.quote(str(place))}`"
        )
