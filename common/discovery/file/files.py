"""Card files: their names, safe reading and writing, and the trusted directory.

Other users can't write to the directory. A user who can write to a parent could replace it, so the
path is walked step by step, each step relative to a checked descriptor.
"""

import contextlib
import errno
import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from common.discovery.watcher import Entry, Odd
from common.errors import DiscoveryError
from common.identity import Incarnation, WorkerId
from common.request_plane.card import CARD_LIMITS

_MAX_LINKS: Final = 40
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def open_private(path: Path, *, create: bool) -> int:
    """Open a directory owned by this user or root; the caller closes the descriptor.

    Args:
        path: links on the way are followed if ours or root's; the last part must not be one.
        create: create missing directories, with mode 0700.

    Raises:
        DiscoveryError: other users could write there; says what to do.
        FileNotFoundError: it does not exist, and ``create`` is off.
        OSError: it can't be opened or created.
    """
    # Only for a relative path: the working directory may have been removed since the start.
    todo = deque((path if path.is_absolute() else Path.cwd() / path).parts[1:])
    links = 0
    here = _root()
    try:
        at = Path("/")
        while todo:
            _check_way(path, at, os.fstat(here))
            name = todo.popleft()
            there = _step(here, name, create=create)
            at = at / name
            status = os.fstat(there)
            if not stat.S_ISLNK(status.st_mode):
                os.close(here)
                here = there
                continue
            os.close(there)
            links += 1
            if not todo:
                raise DiscoveryError(
                    f"cards in {path} can't be trusted: it is a symbolic link; name the "
                    "directory itself with --discovery"
                )
            if not _is_trusted(status.st_uid):
                raise _refusal(path, f"{at} is a symbolic link of user {status.st_uid}")
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = Path(os.readlink(name, dir_fd=here))
            if target.is_absolute():
                root = _root()
                os.close(here)
                here = root
            at = at.parent / target
            todo.extendleft(reversed([part for part in target.parts if part != "/"]))
        status = os.fstat(here)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & _OTHERS_WRITE:
            raise _refusal(path, _described(at, status))
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)


def _root() -> int:
    return os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _step(here: int, name: str, *, create: bool) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=here)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=here)
    return os.open(name, flags, dir_fd=here)


def _check_way(path: Path, at: Path, status: os.stat_result) -> None:
    """Refuse a parent in which others could replace our files. /tmp's sticky bit suffices."""
    movable = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
    if movable or not _is_trusted(status.st_uid):
        raise _refusal(path, _described(at, status))


def _is_trusted(user: int) -> bool:
    return user in (0, os.geteuid()) or user == _unmapped_user()


@cache
def _unmapped_user() -> int | None:
    """Return the user id that stands for all users unknown in this namespace, the host's root among
    them; None if all are known."""
    with Path("/proc/self/uid_map").open() as file:
        if sum(int(line.split()[2]) for line in file) >= 2**32 - 1:
            return None
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


def _described(at: Path, status: os.stat_result) -> str:
    return f"{at} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}"


def _refusal(path: Path, what: str) -> DiscoveryError:
    return DiscoveryError(
        f"cards in {path} can't be trusted: {what}, so others could put workers into this "
        "fleet; use a directory that only you can write to, with --discovery, or take "
        "their right to write away with chmod go-w"
    )


CARD_NAME: Final = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,127})\.([A-Za-z0-9][A-Za-z0-9_-]{0,63})\.json"
)
UNFINISHED: Final = ".new"

# Does not follow links, nor wait for pipes.
READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Version(NamedTuple):
    """File metadata that changes with every renewal of the lease."""

    inode: int
    modified_ns: int
    changed_ns: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Version":
        return cls(status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


def look_at(directory: int, name: str) -> Entry | None:
    """Return the entry of a name; None if it is gone."""
    if not CARD_NAME.fullmatch(name):
        return Entry(name, None, Odd("name", "it is not named WORKER_ID.INCARNATION.json"))
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Entry(name, None, Odd("unreadable", f"it can't be opened: {error.strerror}"))
    return Entry(name, Version.of(status), _judged(name, status), status.st_size)


def _judged(name: str, status: os.stat_result) -> tuple[WorkerId, Incarnation] | Odd:
    if not stat.S_ISREG(status.st_mode):
        return Odd("kind", "it is not a file")
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & _OTHERS_WRITE:
        return Odd(
            "owner",
            f"it belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, "
            "so others could have written it",
        )
    if status.st_size > CARD_LIMITS.most_bytes:
        return Odd("size", f"it has {status.st_size} bytes, more than a card may have")
    worker_id, incarnation, _ = name.rsplit(".", 2)
    return WorkerId(worker_id), Incarnation(incarnation)


def read(directory: int, entry: Entry) -> Entry | None:
    """Return the entry with its content; None if it is gone."""
    try:
        with os.fdopen(os.open(entry.name, READ, dir_fd=directory), "rb") as file:
            status = os.fstat(file.fileno())
            found = entry._replace(version=Version.of(status), whose=_judged(entry.name, status))
            if isinstance(found.whose, Odd):
                return found
            return found._replace(content=file.read(CARD_LIMITS.most_bytes))
    except FileNotFoundError:
        return None
    except OSError as error:
        return entry._replace(whose=Odd("unreadable", f"it can't be read: {error.strerror}"))


def write(directory: int, name: str, content: bytes) -> Version:
    """Write a file atomically: readers never see a part of it."""
    unfinished = f".{name}{UNFINISHED}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # An earlier try or another user may have left a file: opening a pipe would block.
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


@contextlib.contextmanager
def opened(directory: Path, *, create: bool = False) -> Iterator[int]:
    descriptor = open_private(directory, create=create)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
