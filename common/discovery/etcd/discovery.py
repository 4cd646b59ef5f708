"""An etcd cluster as a place for cards."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import SplitResult, parse_qsl, unquote

from common.discovery.base import RENEW_S, Discovery
from common.discovery.etcd.client import EtcdAccess, EtcdClient
from common.discovery.etcd.publisher import EtcdCardPublisher
from common.discovery.etcd.watcher import EtcdCardWatcher
from common.errors import ConfigurationError
from common.fleet_key import FleetKey

_ENDPOINT: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_OPTIONS: Final = ("ca", "certificate", "key", "user", "password-file")


@dataclass(frozen=True)
class EtcdDiscovery(Discovery):
    """Keys below a prefix."""

    form: ClassVar[str] = "etcd://host:2379,host:2379/prefix"

    access: EtcdAccess
    prefix: str

    @classmethod
    def from_url(cls, url: SplitResult) -> "EtcdDiscovery":
        if "@" in url.netloc:
            raise ConfigurationError(
                "a password has no place in a URL: write ?user=NAME&password-file=FILE"
            )
        endpoints = url.netloc.split(",")
        for endpoint in endpoints:
            port = endpoint.rpartition(":")[2] if _has_port(endpoint) else "2379"
            if not _ENDPOINT.fullmatch(endpoint) or not 0 < int(port) < 1 << 16:
                raise ConfigurationError(f"{endpoint!r} is no HOST:PORT")
        prefix = unquote(url.path, errors="strict").rstrip("/")
        if not prefix or url.fragment or not prefix.isprintable():
            raise ConfigurationError("it names no prefix, such as /mmrouter")
        return cls(_access(endpoints, url.query), prefix)

    def __str__(self) -> str:
        return f"etcd://{','.join(self.access.endpoints)}{self.prefix}"

    def publisher(
        self, key: FleetKey | None = None, *, renew_s: float = RENEW_S
    ) -> EtcdCardPublisher:
        return EtcdCardPublisher(EtcdClient(self.access), self.prefix, key, renew_s=renew_s)

    def watcher(self, key: FleetKey | None = None) -> EtcdCardWatcher:
        return EtcdCardWatcher(EtcdClient(self.access), self.prefix, key)


def _access(endpoints: list[str], query: str) -> EtcdAccess:
    given = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    options = dict(given)
    if len(options) < len(given):
        raise ConfigurationError("it has an option twice")
    if unknown := options.keys() - set(_OPTIONS):
        raise ConfigurationError(
            f"it has no option {sorted(unknown)[0]!r}, only {', '.join(_OPTIONS)}"
        )
    if empty := sorted(name for name, value in options.items() if not value):
        raise ConfigurationError(f"its option {empty[0]!r} is empty")
    if odd := sorted(name for name, value in options.items() if "\0" in value):
        raise ConfigurationError(f"its option {odd[0]!r} names no file")
    for one, needed in (
        ("certificate", "key"),
        ("key", "certificate"),
        ("certificate", "ca"),
        ("user", "password-file"),
        ("password-file", "user"),
    ):
        if one in options and needed not in options:
            raise ConfigurationError(f"its option {one!r} needs {needed!r} as well")
    files = {name: Path(value) for name, value in options.items() if name != "user"}
    return EtcdAccess(
        endpoints=tuple(each if _has_port(each) else f"{each}:2379" for each in endpoints),
        ca=files.get("ca"),
        certificate=files.get("certificate"),
        key=files.get("key"),
        user=options.get("user"),
        password_file=files.get("password-file"),
    )


def _has_port(endpoint: str) -> bool:
    return endpoint.rpartition(":")[2].isdigit() and not endpoint.endswith("]")
