"""The file behind an arena: created by its owner, mapped by other processes, removed after its
owner's death.

Not ``multiprocessing.shared_memory``: its resource tracker removes segments in use when any
attached process exits.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from common.errors import ArenaUnavailableError, CorruptSegmentError
from common.transfer.arena.layout import (
    NAME_PATTERN,
    SEGMENT_ALIGNMENT,
    SEGMENTS_START,
    ArenaOffer,
    check_head,
)

logger = logging.getLogger(__name__)

SHARED_MEMORY: Final = Path("/dev/shm")

_CAREFULLY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Any user of the host can put something else under a name there. A pipe would be waited for."""


def new_name() -> str:
    """Return a file name with the owner's pid and start time."""
    pid = os.getpid()
    return f"mmrouter-arena-{pid}-{_start_ticks(pid)}-{secrets.token_hex(8)}"


def create(path: Path, size: int) -> int:
    """Create a file with all memory allocated, so that no access fails. Return a descriptor, locked
    while this process has it. Raises ArenaUnavailableError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ArenaUnavailableError(f"can't create an arena in {path.parent}: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A sparse file would kill this process with SIGBUS once the memory runs out.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        reason = str(error)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            free = shutil.disk_usage(path.parent).free / 1e9
            reason = f"there is not that much room, {free:.2f} GB are free (--mm-arena-gb)"
        raise ArenaUnavailableError(
            f"can't allocate an arena of {size / 1e9:.2f} GB in {path.parent}: {reason}"
        ) from error
    return descriptor


def open_to_map(path: Path, *, writable: bool) -> int:
    """Return a descriptor for mapping an arena. Raises ArenaUnavailableError: it is gone."""
    mode = os.O_RDWR if writable else os.O_RDONLY
    try:
        return os.open(path, mode | _CAREFULLY)
    except OSError as error:
        raise ArenaUnavailableError(f"can't open the arena: {error}") from error


def reap_orphans(directory: Path = SHARED_MEMORY) -> int:
    """Remove dead processes' arenas, return how many; mappings stay valid. A dead owner's pid is
    gone or reused, and its lock free: another PID namespace would hide a living one."""
    removed = 0
    for path in directory.glob("mmrouter-arena-*"):
        match = re.fullmatch(NAME_PATTERN, path.name)
        gone = match and _start_ticks(int(match[1])) != int(match[2])
        if match and gone and _remove_unlocked(path):
            removed += 1
            logger.warning("removed %s: its owner %s is gone", path, match[1])
    return removed


def _remove_unlocked(path: Path) -> bool:
    try:
        with _opened(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (FileNotFoundError, BlockingIOError):
        # Another process reaps too, or the owner is in another PID namespace.
        return False
    except OSError as error:
        # Another user's file, or a link.
        logger.debug("%s is left alone: %s", path, error)
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | _CAREFULLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _start_ticks(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; None if dead or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, which may contain anything.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


class ArenaMapping:
    """Memory of one arena, private on write unless opened writable. Mapped until its last view is
    gone, whatever happens to the owner."""

    def __init__(self, offer: ArenaOffer, memory: memoryview) -> None:
        """Take ownership of mapped memory; use :meth:`open`."""
        self.offer = offer
        self.memory = memory

    @classmethod
    def open(
        cls, offer: ArenaOffer, directory: Path = SHARED_MEMORY, *, writable: bool = False
    ) -> "ArenaMapping":
        """Map an arena and prove that it is the one offered. Writes are shared if ``writable``,
        else private. Raises ArenaUnavailableError: it can't be read here, or is another arena."""
        path = directory / offer.name
        try:
            mode = os.O_RDWR if writable else os.O_RDONLY
            descriptor = os.open(path, mode | _CAREFULLY)
        except OSError as error:
            raise ArenaUnavailableError(f"can't open the arena {path}: {error}") from error
        try:
            _check_file(descriptor, offer)
            # Private rather than read-only: torch wants writable memory, and a stray write should
            # cost a page, not the process.
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
            memory = memoryview(mmap.mmap(descriptor, offer.size, access=access))
        except (OSError, ValueError) as error:
            raise ArenaUnavailableError(f"can't map the arena {path}: {error}") from error
        finally:
            os.close(descriptor)
        check_head(memory, offer)
        return cls(offer, memory)

    def segment(self, offset: int, length: int) -> memoryview:
        """Return the segment at an offset in the arena. Raises CorruptSegmentError: impossible."""
        if (
            offset < SEGMENTS_START
            or offset % SEGMENT_ALIGNMENT
            or (offset + length > self.offer.size)
        ):
            raise CorruptSegmentError(
                f"no segment of {length} bytes can be at {offset} in an arena of "
                f"{self.offer.size} bytes"
            )
        return self.memory[offset : offset + length]


def _check_file(descriptor: int, offer: ArenaOffer) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise ArenaUnavailableError(f"{offer.name} is not a file of this user")
    if status.st_mode & 0o077:
        raise ArenaUnavailableError(f"{offer.name} is open to other users")
    # Access beyond the end of a file kills the process.
    if status.st_size != offer.size:
        raise ArenaUnavailableError(
            f"{offer.name} has {status.st_size} bytes, not the {offer.size} offered"
        )
