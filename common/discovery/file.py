"""Discovery in a directory: one file per incarnation of a worker, touched as long as it lives.

The embedded default, for one host or a shared file system. A card is written to a
temporary name and renamed, so a reader never sees half of one. Directory 0700, files
0600: a card decides which model a frontend loads, so nobody else may write one.

A lease is renewed by anything that changes about the file, and its end is measured by the
reader's own monotonic clock. No two clocks are ever compared.
"""

import asyncio
import contextlib
import logging
import math
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, NamedTuple
from urllib.parse import SplitResult, unquote_to_bytes

from common.card import WorkerCard
from common.discovery.base import (
    RENEW_S,
    CardChange,
    CardGone,
    CardPresent,
    CardPublisher,
    CardRefused,
    CardWatcher,
    Discovery,
)
from common.discovery.private_directory import open_private
from common.discovery.seal import seal, unseal
from common.errors import CardError, CardKeyError, ConfigurationError, DiscoveryError
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.supervised import supervise
from common.telemetry import DISCOVERY_ERRORS, MALFORMED_CARDS

logger = logging.getLogger(__name__)

LEASE_S: Final = 10.0
"""A card about whose file nothing changed for this long is void."""

POLL_S: Final = 0.25

LONGEST_LOOK_S: Final = 1.0
"""More than this between two looks doesn't count: the reader itself stood still."""

SWEEP_S: Final = 60.0
"""Files of the dead are removed after at most twice this long."""

WITHDRAW_S: Final = 5.0
"""How long a leaving worker waits for a file system that hangs."""

MAX_CARD_BYTES: Final = 1 << 20

_CARD_NAME: Final = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,127})\.([A-Za-z0-9][A-Za-z0-9_-]{0,63})\.json"
)
_UNFINISHED: Final = ".new"

# Links are not followed, and pipes not waited for.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class _Version(NamedTuple):
    """What changes about a file whenever its lease is renewed."""

    inode: int
    modified_ns: int
    changed_ns: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> "_Version":
        return cls(status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


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
        self._file = _CardFile(directory)
        self._tasks: list[asyncio.Task[None]] = []

    async def publish(self, card: WorkerCard) -> None:
        name = f"{card.worker_id}.{card.incarnation}.json"
        if not _CARD_NAME.fullmatch(name):
            raise DiscoveryError(
                f"worker id {card.worker_id!r} can't name a file: "
                "use letters, digits, '.', '_', '-'"
            )
        try:
            await asyncio.to_thread(self._file.write, name, seal(card, self._key))
        except OSError as error:
            raise DiscoveryError(
                f"card can't be written to {self._directory / name}: {error}"
            ) from error
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(supervise("card renewal", self._renew), name="renew-card"),
                asyncio.create_task(supervise("card sweep", self._sweep), name="sweep-cards"),
            ]

    async def withdraw(self) -> None:
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

    async def _renew(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                await asyncio.to_thread(self._file.renew)
            except (OSError, DiscoveryError) as error:
                # The disk is full or gone, or others may write there now. The operator may
                # put that right, so it is tried again and again.
                DISCOVERY_ERRORS.labels("renewal").inc()
                if str(error) != said:
                    said = str(error)
                    logger.warning("the lease of the card can't be renewed: %s", error)
            else:
                said = ""

    async def _sweep(self) -> None:
        """Remove what workers that were killed left behind.

        A worker that only stood still writes its card again when it goes on.
        """
        before: dict[str, _Version] = {}
        while True:
            await asyncio.sleep(self._sweep_s)
            try:
                before = await asyncio.to_thread(_sweep, self._directory, before)
            except (OSError, DiscoveryError) as error:
                logger.debug("no files of dead workers were removed: %s", error)


class _CardFile:
    """The file of a publisher. Its methods run in threads, one at a time, since a thread goes
    on when whoever waits for it is cancelled.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._one_at_a_time = threading.Lock()
        self._name = ""  # nothing is published
        self._content = b""
        self._written: _Version | None = None
        self._removed = False

    def write(self, name: str, content: bytes) -> None:
        """Write the file, now or with the next renewal that succeeds."""
        with self._one_at_a_time:
            if self._removed:
                return
            self._name, self._content, self._written = name, content, None
            with _opened(self._directory, create=True) as directory:
                self._written = _write(directory, name, content)

    def renew(self) -> None:
        """Touch the file; write it again if it is not as we left it."""
        with self._one_at_a_time:
            if self._removed or not self._name:
                return
            with _opened(self._directory, create=True) as directory:
                if self._touched(directory):
                    return
                self._written = _write(directory, self._name, self._content)
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
            with contextlib.suppress(FileNotFoundError), _opened(self._directory) as directory:
                os.unlink(self._name, dir_fd=directory)

    def _touched(self, directory: int) -> bool:
        """Renew the lease of the file that we wrote, if it is still there as it was."""
        try:
            descriptor = os.open(self._name, _READ, dir_fd=directory)
        except OSError:
            return False
        try:
            if _Version.of(os.fstat(descriptor)) != self._written:
                return False
            os.utime(descriptor)
            self._written = _Version.of(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        return True


@dataclass
class _Seen:
    """What a watcher knows of one file.

    Attributes:
        version: as it was last.
        content: what was read last, whether it is a card or not.
        card: the last card that was told of; None after its end.
        told: whether anything was told of it that has not ended.
        unrenewed_s: how long nothing has changed about it. Infinite before a change was seen,
            for who knows how long ago its worker died.
        problem: why it can't be used, as it was said last.
    """

    version: _Version | None = None
    content: bytes | None = None
    card: WorkerCard | None = None
    told: bool = False
    unrenewed_s: float = math.inf
    problem: str = ""


class FileCardWatcher(CardWatcher):
    """Polls a directory for cards. The directory need not exist yet."""

    def __init__(
        self,
        directory: Path,
        key: FleetKey | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            key: of the fleet; cards that aren't sealed with it are refused.
            clock: monotonic seconds.
        """
        self._directory = directory
        self._key = key
        self._clock = clock
        self._files: dict[str, _Seen] = {}
        self._pending: deque[CardChange] = deque()
        self._one_at_a_time = threading.Lock()  # a look goes on if its iteration is cancelled
        self._looked_at: float | None = None  # monotonic seconds; None before the first time
        self._problem = ""

    async def changes(self) -> AsyncIterator[CardChange]:
        while True:
            while self._pending:
                yield self._pending.popleft()
            await asyncio.to_thread(self._look)
            if not self._pending:
                await asyncio.sleep(POLL_S)

    def _look(self) -> None:
        """Note what has changed since the last look. Runs in a thread."""
        with self._one_at_a_time:
            self._look_once()

    def _look_once(self) -> None:
        now, first = self._clock(), self._looked_at is None
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_LOOK_S)
        try:
            found = self._first_read() if first else self._read()
        except (OSError, DiscoveryError) as error:
            if first:
                raise DiscoveryError(f"no cards can be read: {error}") from error
            # Leases stand still meanwhile.
            DISCOVERY_ERRORS.labels("listing").inc()
            if str(error) != self._problem:
                self._problem = str(error)
                logger.error("no cards can be read, the last ones stay: %s", error)
            self._looked_at = now
            return
        self._problem = ""
        self._looked_at = now
        for name in self._files.keys() - found.keys():
            self._end(name, self._files.pop(name))
        for name, entry in found.items():
            seen = self._files.get(name)
            if seen is None:
                seen = self._files[name] = _Seen(unrenewed_s=math.inf if first else 0.0)
            else:
                seen.unrenewed_s += passed
            self._judge(name, seen, entry)

    def _first_read(self) -> "dict[str, _Entry | _Odd]":
        # So that nobody else makes it first. Where we can't, a worker may.
        with contextlib.suppress(OSError), _opened(self._directory, create=True):
            pass
        return self._read()

    def _read(self) -> "dict[str, _Entry | _Odd]":
        found: dict[str, _Entry | _Odd] = {}
        # Without the directory there are no cards; workers make it again.
        with contextlib.suppress(FileNotFoundError), _opened(self._directory) as directory:
            for name in os.listdir(directory):  # noqa: PTH208  # a descriptor
                if name.startswith(".") or not name.endswith(".json"):
                    continue
                seen = self._files.get(name)
                with contextlib.suppress(FileNotFoundError):  # withdrawn meanwhile
                    found[name] = _read(directory, name, None if seen is None else seen.version)
        return found

    def _judge(self, name: str, seen: _Seen, entry: "_Entry | _Odd") -> None:
        """What the state of one file means."""
        if isinstance(entry, _Odd):
            if seen.problem != entry.what:
                seen.problem = entry.what
                DISCOVERY_ERRORS.labels(entry.reason).inc()
                logger.warning("%r in %s is skipped: %s", name, self._directory, entry.what)
        else:
            seen.problem = ""
            if entry.version != seen.version:
                self._changed(name, seen, entry)
        if seen.unrenewed_s > LEASE_S:
            self._end(name, seen)

    def _changed(self, name: str, seen: _Seen, entry: "_Entry") -> None:
        """A file is new, or its lease was renewed, or it has another content."""
        alive = seen.version is not None or math.isfinite(seen.unrenewed_s)
        another = entry.content != seen.content
        seen.version, seen.content = entry.version, entry.content
        worker_id, incarnation = _named(name)
        try:
            card = unseal(entry.content, self._key)
            if (card.worker_id, card.incarnation) != (worker_id, incarnation):
                raise CardError(
                    f"card {name} names worker {card.worker_id!r}, incarnation {card.incarnation!r}"
                )
        except CardError as error:
            if another:
                logger.warning("card %s ignored: %s", name, error)
                if not isinstance(error, CardKeyError):
                    MALFORMED_CARDS.inc()
            if alive and seen.card is None:  # else the card that we know stays, under its lease
                seen.unrenewed_s = 0.0
                if another or not seen.told:
                    seen.told = True
                    self._pending.append(CardRefused(worker_id, incarnation, error))
            return
        if alive:
            seen.unrenewed_s = 0.0
            if card != seen.card:
                seen.card, seen.told = card, True
                self._pending.append(CardPresent(card))

    def _end(self, name: str, seen: _Seen) -> None:
        """The file is gone, or its lease is over."""
        if seen.told:
            seen.card, seen.told = None, False
            self._pending.append(CardGone(*_named(name)))


class _Entry(NamedTuple):
    """A file that may be a card. Its content is read only if the version is a new one."""

    version: _Version
    content: bytes


class _Odd(NamedTuple):
    """Something else.

    Attributes:
        reason: a short constant, for counters.
        what: a sentence.
    """

    reason: str
    what: str


def _read(directory: int, name: str, known: _Version | None) -> _Entry | _Odd:
    """Raises FileNotFoundError; whatever else can go wrong makes the entry odd."""
    if not _CARD_NAME.fullmatch(name):
        return _Odd("name", "it is not named WORKER_ID.INCARNATION.json")
    try:
        descriptor = os.open(name, _READ, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        return _Odd("unreadable", f"it can't be opened: {error.strerror}")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return _Odd("kind", "it is not a file")
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return _Odd(
                "owner",
                f"it belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, "
                "so others could have written it",
            )
        if status.st_size > MAX_CARD_BYTES:
            return _Odd("size", f"it has {status.st_size} bytes, more than a card may have")
        version = _Version.of(status)
        if version == known:
            return _Entry(version, b"")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return _Entry(version, file.read(MAX_CARD_BYTES))
    except OSError as error:
        return _Odd("unreadable", f"it can't be read: {error.strerror}")
    finally:
        os.close(descriptor)


def _named(name: str) -> tuple[WorkerId, Incarnation]:
    worker_id, incarnation, _ = name.rsplit(".", 2)
    return WorkerId(worker_id), Incarnation(incarnation)


@contextlib.contextmanager
def _opened(directory: Path, *, create: bool = False) -> Iterator[int]:
    descriptor = open_private(directory, create=create)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(directory: int, name: str, content: bytes) -> _Version:
    """Write a file that nobody ever sees half of."""
    unfinished = f".{name}{_UNFINISHED}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # What an earlier try left, or somebody put there: a pipe would be waited for.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished, dir_fd=directory)
    try:
        with os.fdopen(os.open(unfinished, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(content)
            file.flush()
        os.rename(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
        return _Version.of(os.stat(name, dir_fd=directory, follow_symlinks=False))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=directory)
        raise


def _sweep(path: Path, before: dict[str, _Version]) -> dict[str, _Version]:
    """Remove files of cards about which nothing has changed; what is there now."""
    now: dict[str, _Version] = {}
    with _opened(path) as directory:
        for name in os.listdir(directory):  # noqa: PTH208  # a descriptor
            if not _CARD_NAME.fullmatch(name.removeprefix(".").removesuffix(_UNFINISHED)):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                now[name] = _Version.of(status)
                if stat.S_ISREG(status.st_mode) and now[name] == before.get(name):
                    os.unlink(name, dir_fd=directory)
                    logger.info("card %s was removed: nobody has renewed it for long", path / name)
    return now
