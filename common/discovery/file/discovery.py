"""A directory as a place for cards, which frontends poll."""

import asyncio
import contextlib
import logging
import os
import stat
import threading
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import SplitResult, unquote_to_bytes

from common.discovery.base import RENEW_S, Discovery, RenewedPublisher
from common.discovery.file.files import (
    CARD_NAME,
    READ,
    UNFINISHED,
    Version,
    look_at,
    opened,
    read,
    write,
)
from common.discovery.sealed_cards import seal
from common.discovery.watcher import Entry, Place, PollingWatcher
from common.errors import ConfigurationError, DiscoveryError
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import DISCOVERY_ERRORS
from common.request_plane.card import WorkerCard

logger = logging.getLogger(__name__)


class CardFile:
    """File of a publisher. Its methods run in threads, one at a time: a thread continues when its
    waiter is cancelled."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._one_at_a_time = threading.Lock()
        self._name = ""  # nothing is published
        self._content = b""
        self._written: Version | None = None
        self._removed = False

    def check(self) -> None:
        """Raise OSError or DiscoveryError if no file can be written here."""
        with opened(self._directory, create=True) as directory:
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True):
                raise DiscoveryError(f"nothing can be written to {self._directory}")

    def write(self, name: str, content: bytes) -> None:
        """Write the file, now or with the next successful renewal."""
        with self._one_at_a_time:
            if self._removed:
                return
            self._name, self._content, self._written = name, content, None
            with opened(self._directory, create=True) as directory:
                self._written = write(directory, name, content)

    def renew(self) -> None:
        """Touch the file; write it again if it has changed."""
        with self._one_at_a_time:
            if self._removed or not self._name:
                return
            with opened(self._directory, create=True) as directory:
                if self._touched(directory):
                    return
                self._written = write(directory, self._name, self._content)
        DISCOVERY_ERRORS.labels("lost").inc()
        logger.warning(
            "card %s was lost or changed by another process; rewriting it",
            self._directory / self._name,
        )

    def remove(self) -> None:
        with self._one_at_a_time:
            self._removed = True
            if not self._name:
                return
            with contextlib.suppress(FileNotFoundError), opened(self._directory) as directory:
                os.unlink(self._name, dir_fd=directory)

    def _touched(self, directory: int) -> bool:
        """Touch our file; return False if it is gone or has changed."""
        try:
            descriptor = os.open(self._name, READ, dir_fd=directory)
        except OSError:
            return False
        try:
            if Version.of(os.fstat(descriptor)) != self._written:
                return False
            os.utime(descriptor)
            self._written = Version.of(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        return True


SWEEP_S: Final = 60.0  # files of the dead are removed after at most twice this long


class FileCardPublisher(RenewedPublisher):
    """Publishes one card as ``<directory>/<worker id>.<incarnation>.json``."""

    place = "the file system"

    def __init__(
        self,
        directory: Path,
        key: FleetKey | None = None,
        *,
        renew_s: float = RENEW_S,
        sweep_s: float = SWEEP_S,
    ) -> None:
        """Remove a dead worker's file once it is unchanged for ``sweep_s`` seconds."""
        super().__init__(key, renew_s)
        self._directory = directory
        self._sweep_s = sweep_s
        self._file = CardFile(directory)

    async def check(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        name = _name_of(worker_id, incarnation)
        try:
            await asyncio.to_thread(self._file.check)
        except OSError as error:
            raise DiscoveryError(
                f"card can't be written to {self._directory / name}: {error}"
            ) from error

    async def publish(self, card: WorkerCard) -> None:
        name = _name_of(card.worker_id, card.incarnation)
        try:
            await asyncio.to_thread(self._file.write, name, seal(card, self.key))
        except OSError as error:
            raise DiscoveryError(
                f"card can't be written to {self._directory / name}: {error}"
            ) from error
        self.keep_renewed(sweep=self._sweep)

    async def _renew(self) -> None:
        await asyncio.to_thread(self._file.renew)

    async def _remove(self) -> None:
        await asyncio.to_thread(self._file.remove)

    async def _sweep(self) -> None:
        """Remove the cards of killed workers. One that was only suspended writes its card again."""
        before: dict[str, Version] = {}
        while True:
            await asyncio.sleep(self._sweep_s)
            try:
                before = await asyncio.to_thread(_sweep, self._directory, before)
            except (OSError, DiscoveryError) as error:
                logger.debug("no files of dead workers were removed: %s", error)


def _name_of(worker_id: WorkerId, incarnation: Incarnation) -> str:
    name = f"{worker_id}.{incarnation}.json"
    if not CARD_NAME.fullmatch(name):
        raise DiscoveryError(
            f"worker id {worker_id!r} can't name a file: use letters, digits, '.', '_', '-'"
        )
    return name


def _sweep(path: Path, before: dict[str, Version]) -> dict[str, Version]:
    """Remove card files that have not changed; return the present versions."""
    now: dict[str, Version] = {}
    with opened(path) as directory:
        for name in os.listdir(directory):  # noqa: PTH208  # a descriptor
            if not CARD_NAME.fullmatch(name.removeprefix(".").removesuffix(UNFINISHED)):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                now[name] = Version.of(status)
                if stat.S_ISREG(status.st_mode) and now[name] == before.get(name):
                    os.unlink(name, dir_fd=directory)
                    logger.info("removed the stale card %s", path / name)
    return now


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

    async def pages(self) -> AsyncGenerator[Iterable[Entry], None]:
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
