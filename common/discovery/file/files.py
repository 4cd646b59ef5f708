"""The files in which cards lie: what they are called, how they are read and written."""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from common.discovery.file.private_directory import open_private
from common.identity import Incarnation, WorkerId

MAX_CARD_BYTES: Final = 1 << 20

CARD_NAME: Final = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,127})\.([A-Za-z0-9][A-Za-z0-9_-]{0,63})\.json"
)
UNFINISHED: Final = ".new"

# Links are not followed, and pipes not waited for.
READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Version(NamedTuple):
    """What changes about a file whenever its lease is renewed."""

    inode: int
    modified_ns: int
    changed_ns: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Version":
        return cls(status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


class Entry(NamedTuple):
    """A file that may be a card. Its content is read only if the version is a new one."""

    version: Version
    content: bytes


class Odd(NamedTuple):
    """Something else.

    Attributes:
        reason: a short constant, for counters.
        what: a sentence.
    """

    reason: str
    what: str


def read(directory: int, name: str, known: Version | None) -> Entry | Odd:
    """Raises FileNotFoundError; whatever else can go wrong makes the entry odd."""
    if not CARD_NAME.fullmatch(name):
        return Odd("name", "it is not named WORKER_ID.INCARNATION.json")
    try:
        descriptor = os.open(name, READ, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        return Odd("unreadable", f"it can't be opened: {error.strerror}")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return Odd("kind", "it is not a file")
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return Odd(
                "owner",
                f"it belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, "
                "so others could have written it",
            )
        if status.st_size > MAX_CARD_BYTES:
            return Odd("size", f"it has {status.st_size} bytes, more than a card may have")
        version = Version.of(status)
        if version == known:
            return Entry(version, b"")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return Entry(version, file.read(MAX_CARD_BYTES))
    except OSError as error:
        return Odd("unreadable", f"it can't be read: {error.strerror}")
    finally:
        os.close(descriptor)


def write(directory: int, name: str, content: bytes) -> Version:
    """Write a file that nobody ever sees half of."""
    unfinished = f".{name}{UNFINISHED}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # What an earlier try left, or somebody put there: a pipe would be waited for.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished, dir_fd=directory)
    try:
        with os.fdopen(os.open(unfinished, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(content)
            file.flush()
        os.rename(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
        return Version.of(os.stat(name, dir_fd=directory, follow_symlinks=False))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=directory)
        raise


def named_by(name: str) -> tuple[WorkerId, Incarnation]:
    worker_id, incarnation, _ = name.rsplit(".", 2)
    return WorkerId(worker_id), Incarnation(incarnation)


@contextlib.contextmanager
def opened(directory: Path, *, create: bool = False) -> Iterator[int]:
    descriptor = open_private(directory, create=create)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
