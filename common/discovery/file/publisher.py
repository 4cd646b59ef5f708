"""A worker's side: one card as a file, touched as long as the worker lives."""

import asyncio
import contextlib
import logging
import os
import stat
import threading
from functools import partial
from pathlib import Path
from typing import Final

from common.aio.supervised import supervise
from common.discovery.base import RENEW_S, CardPublisher, keep_renewing
from common.discovery.file.files import CARD_NAME, READ, UNFINISHED, Version, opened, write
from common.discovery.sealed_cards import seal
from common.errors import DiscoveryError
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import DISCOVERY_ERRORS
from common.request_plane.card import WorkerCard

logger = logging.getLogger(__name__)


class CardFile:
    """The file of a publisher. Its methods run in threads, one at a time, since a thread goes
    on when whoever waits for it is cancelled.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._one_at_a_time = threading.Lock()
        self._name = ""  # nothing is published
        self._content = b""
        self._written: Version | None = None
        self._removed = False

    def check(self) -> None:
        """Raises OSError or DiscoveryError if no file can be written here."""
        with opened(self._directory, create=True) as directory:
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True):
                raise DiscoveryError(f"nothing can be written to {self._directory}")

    def write(self, name: str, content: bytes) -> None:
        """Write the file, now or with the next renewal that succeeds."""
        with self._one_at_a_time:
            if self._removed:
                return
            self._name, self._content, self._written = name, content, None
            with opened(self._directory, create=True) as directory:
                self._written = write(directory, name, content)

    def renew(self) -> None:
        """Touch the file; write it again if it is not as we left it."""
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
        """Remove the file for good."""
        with self._one_at_a_time:
            self._removed = True
            if not self._name:
                return
            with contextlib.suppress(FileNotFoundError), opened(self._directory) as directory:
                os.unlink(self._name, dir_fd=directory)

    def _touched(self, directory: int) -> bool:
        """Renew the lease of the file that we wrote, if it is still there as it was."""
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


SWEEP_S: Final = 60.0
"""Files of the dead are removed after at most twice this long."""

WITHDRAW_S: Final = 5.0
"""How long a leaving worker waits for a file system that hangs."""


class FileCardPublisher(CardPublisher):
    """Publishes one card as ``<directory>/<worker id>.<incarnation>.json``."""

    def __init__(
        self,
        directory: Path,
        key: FleetKey | None = None,
        *,
        renew_s: float = RENEW_S,
        sweep_s: float = SWEEP_S,
    ) -> None:
        """
        Args:
            key: seals the card; None in fleets without one.
            renew_s: seconds between renewals of the lease.
            sweep_s: seconds for which a file must not change to be removed as a dead worker's.
        """
        self._directory = directory
        self._key = key
        self._renew_s = renew_s
        self._sweep_s = sweep_s
        self._file = CardFile(directory)
        self._tasks: list[asyncio.Task[None]] = []
        self._withdrawn = False

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
            await asyncio.to_thread(self._file.write, name, seal(card, self._key))
        except OSError as error:
            raise DiscoveryError(
                f"card can't be written to {self._directory / name}: {error}"
            ) from error
        if not self._tasks and not self._withdrawn:
            renew = partial(asyncio.to_thread, self._file.renew)
            renewal = partial(keep_renewing, renew, self._renew_s)
            self._tasks = [
                asyncio.create_task(supervise("card renewal", renewal), name="renew-card"),
                asyncio.create_task(supervise("card sweep", self._sweep), name="sweep-cards"),
            ]

    async def withdraw(self) -> None:
        self._withdrawn = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        try:
            async with asyncio.timeout(WITHDRAW_S):
                await asyncio.to_thread(self._file.remove)
        except (OSError, DiscoveryError) as error:  # a TimeoutError is an OSError
            logger.warning(
                "the card can't be withdrawn, its lease will end: %s",
                str(error) or "the file system does not answer",
            )

    async def _sweep(self) -> None:
        """Remove what workers that were killed left behind.

        A worker that only stood still writes its card again when it goes on.
        """
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
    """Remove files of cards about which nothing has changed; what is there now."""
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
