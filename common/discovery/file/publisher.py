"""A worker's side: one card as a file, touched while the worker lives."""

import asyncio
import contextlib
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Final

from common.discovery.base import RENEW_S, RenewedPublisher
from common.discovery.file.files import CARD_NAME, READ, UNFINISHED, Version, opened, write
from common.discovery.sealed_cards import seal
from common.errors import DiscoveryError
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
            "card %s was lost or changed by somebody else: written again",
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
                    logger.info("card %s was removed: nobody has renewed it for long", path / name)
    return now
