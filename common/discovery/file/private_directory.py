"""Opening a directory into which nobody else can put anything.

Whoever can write to a directory on the way can put another one in its place, so the way is
walked step by step, relative to what was opened and checked before.
"""

import contextlib
import errno
import os
import stat
from collections import deque
from functools import cache
from pathlib import Path
from typing import Final

from common.errors import DiscoveryError

_MOST_LINKS: Final = 40
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def open_private(path: Path, *, create: bool) -> int:
    """A descriptor of a directory that is ours or root's; the caller closes it.

    Args:
        path: links on the way are followed if they are ours or root's, but it must not be
            one itself.
        create: make what is missing, with mode 0700.

    Raises:
        DiscoveryError: others could put something in there; says what to do.
        FileNotFoundError: it isn't there, and is not to be made.
        OSError: it can't be opened or made.
    """
    # Not asked for needlessly: the working directory may have been removed since the start.
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
                    "directory itself with --discovery-dir"
                )
            if not _is_trusted(status.st_uid):
                raise _refusal(path, f"{at} is a symbolic link of user {status.st_uid}")
            if links > _MOST_LINKS:
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
    """Others may have things of their own on the way, as in /tmp, but must not replace ours."""
    movable = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
    if movable or not _is_trusted(status.st_uid):
        raise _refusal(path, _described(at, status))


def _is_trusted(user: int) -> bool:
    return user in (0, os.geteuid()) or user == _unmapped_user()


@cache
def _unmapped_user() -> int | None:
    """The user to whom everything of users unknown in this user namespace seems to belong,
    root of the host among them; None where all users are known.
    """
    with Path("/proc/self/uid_map").open() as file:
        if sum(int(line.split()[2]) for line in file) >= 2**32 - 1:
            return None
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


def _described(at: Path, status: os.stat_result) -> str:
    return f"{at} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}"


def _refusal(path: Path, what: str) -> DiscoveryError:
    return DiscoveryError(
        f"cards in {path} can't be trusted: {what}, so others could put workers into this "
        "fleet; use a directory that only you can write to, with --discovery-dir, or take "
        "their right to write away with chmod go-w"
    )
