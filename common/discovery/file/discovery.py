"""A directory as a place for cards, which frontends poll."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import SplitResult, unquote_to_bytes

from common.discovery.base import RENEW_S, Discovery
from common.discovery.file.files import look_at, opened, read
from common.discovery.file.publisher import FileCardPublisher
from common.discovery.watcher import Entry, Place, PollingWatcher
from common.errors import ConfigurationError, DiscoveryError
from common.fleet_key import FleetKey

LEASE_S: Final = 10.0  # a card about whose file nothing changed for this long is void

POLL_S: Final = 0.25


class CardDirectory(Place):
    """A directory, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self.poll_s, self.lease_s = POLL_S, LEASE_S
        self._directory = directory
        self._to_make = True

    def __str__(self) -> str:
        return str(self._directory)

    async def pages(self) -> AsyncGenerator[Sequence[Entry], None]:
        yield await asyncio.to_thread(self._list)

    async def read(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        return await asyncio.to_thread(self._read, entries)

    def _list(self) -> list[Entry]:
        if self._to_make:
            # Created here so that no other user creates it first. If that fails, a worker may
            # succeed.
            self._to_make = False
            with contextlib.suppress(OSError), opened(self._directory, create=True):
                pass
        try:
            # Without the directory there are no cards; workers create it again.
            with contextlib.suppress(FileNotFoundError), opened(self._directory) as directory:
                names = os.listdir(directory)  # noqa: PTH208  # a descriptor
                found = (
                    look_at(directory, name)
                    for name in names
                    if not name.startswith(".") and name.endswith(".json")
                )
                return [each for each in found if each is not None]
        except OSError as error:
            raise DiscoveryError(str(error)) from error
        return []

    def _read(self, entries: Sequence[Entry]) -> list[Entry]:
        try:
            with contextlib.suppress(FileNotFoundError), opened(self._directory) as directory:
                found = (read(directory, entry) for entry in entries)
                return [each for each in found if each is not None]
        except OSError as error:
            raise DiscoveryError(str(error)) from error
        return []


@dataclass(frozen=True)
class FileDiscovery(Discovery):
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

    def watcher(self, key: FleetKey | None = None) -> PollingWatcher:
        return PollingWatcher(CardDirectory(self.directory), key)
