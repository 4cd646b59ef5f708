"""A directory as a place for cards."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import SplitResult, unquote_to_bytes

from common.discovery.base import RENEW_S, Discovery
from common.discovery.file.publisher import FileCardPublisher
from common.discovery.file.watcher import FileCardWatcher
from common.errors import ConfigurationError
from common.fleet_key import FleetKey


@dataclass(frozen=True)
class FileDiscovery(Discovery):
    """A directory of cards."""

    form: ClassVar[str] = "file:///absolute/directory"

    directory: Path

    @classmethod
    def from_url(cls, url: SplitResult) -> "FileDiscovery":
        if url.netloc not in ("", "localhost"):
            raise ConfigurationError(f"{url.netloc!r} is a host, and a directory is on this one")
        if url.query or url.fragment:
            raise ConfigurationError("it goes on behind a directory: write ? as %3F and # as %23")
        path = os.fsdecode(unquote_to_bytes(url.path))
        if not path.startswith("/") or "\0" in path:
            raise ConfigurationError("it names no absolute directory")
        return cls(Path(path))

    def __str__(self) -> str:
        return str(self.directory)

    def publisher(
        self, key: FleetKey | None = None, *, renew_s: float = RENEW_S
    ) -> "FileCardPublisher":
        return FileCardPublisher(self.directory, key, renew_s=renew_s)

    def watcher(self, key: FleetKey | None = None) -> "FileCardWatcher":
        return FileCardWatcher(self.directory, key)
