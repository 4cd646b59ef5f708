"""Discovery in a directory: one card file per worker, the lease is its mtime.

The embedded default, for one host or a shared file system. A card is written to a
temporary name and renamed, so a reader never sees half of one. Directory 0700,
files 0600: a card decides which model a frontend loads, so nobody else may write one.
"""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

from common.card import WorkerCard
from common.discovery.base import CardChange, CardGone, CardPresent, CardPublisher, CardWatcher
from common.errors import CardError, DiscoveryError
from common.identity import WorkerId
from common.telemetry import MALFORMED_CARDS

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""A card whose file was not touched for this long is void."""

RENEW_S = LEASE_S / 4
POLL_S = 0.25

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class FileCardPublisher(CardPublisher):
    """Publishes one card as ``<directory>/<worker id>.json``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path: Path | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def publish(self, card: WorkerCard) -> None:
        if not _SAFE_NAME.fullmatch(card.worker_id):
            raise DiscoveryError(
                f"worker id {card.worker_id!r} can't name a file: "
                "use letters, digits, '.', '_', '-'"
            )
        path = self._directory / f"{card.worker_id}.json"
        try:
            await asyncio.to_thread(_write_atomically, path, card.to_json())
        except OSError as error:
            raise DiscoveryError(f"card can't be written to {path}: {error}") from error
        self._path = path
        if self._renewal is None:
            self._renewal = asyncio.create_task(self._renew(), name="renew-card-lease")

    async def withdraw(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewal
            self._renewal = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            assert self._path is not None
            try:
                await asyncio.to_thread(os.utime, self._path)
            except OSError as error:
                # Someone else removed the file, or the disk is gone: keep trying,
                # the operator may put it back, and say so each time.
                logger.warning("lease of card %s can't be renewed: %s", self._path, error)


class FileCardWatcher(CardWatcher):
    """Polls a directory for cards. The directory need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._contents: dict[WorkerId, bytes] = {}
        self._malformed: dict[str, bytes] = {}

    async def changes(self) -> AsyncIterator[CardChange]:
        while True:
            for change in await asyncio.to_thread(self._scan):
                yield change
            await asyncio.sleep(POLL_S)

    def _scan(self) -> list[CardChange]:
        present: dict[WorkerId, bytes] = {}
        oldest = time.time() - LEASE_S
        try:
            _check_owner(self._directory)
            entries = list(os.scandir(self._directory))
        except FileNotFoundError:
            entries = []
        for entry in entries:
            if not entry.name.endswith(".json"):
                continue
            try:
                if entry.stat().st_mtime < oldest:
                    continue
                present[WorkerId(entry.name.removesuffix(".json"))] = Path(entry.path).read_bytes()
            except FileNotFoundError:
                continue  # withdrawn between the listing and the reading

        changes: list[CardChange] = []
        for worker_id in self._contents.keys() - present.keys():
            del self._contents[worker_id]
            changes.append(CardGone(worker_id))
        for worker_id, content in present.items():
            if (
                self._contents.get(worker_id) == content
                or self._malformed.get(worker_id) == content
            ):
                continue
            try:
                card = WorkerCard.from_json(content)
                if card.worker_id != worker_id:
                    raise CardError(f"card names worker {card.worker_id!r}")
            except CardError as error:
                self._malformed[worker_id] = content
                MALFORMED_CARDS.inc()
                logger.warning("card %s.json ignored: %s", worker_id, error)
                if self._contents.pop(worker_id, None) is not None:
                    changes.append(CardGone(worker_id))
                continue
            self._malformed.pop(worker_id, None)
            self._contents[worker_id] = content
            changes.append(CardPresent(card))
        return changes


def _check_owner(directory: Path) -> None:
    """Refuse a directory into which strangers could put cards.

    Raises:
        DiscoveryError: it is another user's, or open to all.
        FileNotFoundError: it isn't there.
    """
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o002:
        raise DiscoveryError(
            f"cards in {directory} can't be trusted: it belongs to user {status.st_uid} with mode "
            f"{status.st_mode & 0o777:o}, so others could put workers into this fleet; "
            "use a directory of your own with --discovery-dir"
        )


def _write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
