"""Noticing that somebody opens a file, whatever library and process does it."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IN_OPEN = 0x20
_libc = ctypes.CDLL(None, use_errno=True)


class Opens:
    """Since it was made. The kernel tells."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def any(self) -> bool:
        try:
            return bool(os.read(self._descriptor, 4096))
        except BlockingIOError:
            return False


@contextmanager
def opens_of(path: Path) -> Iterator[Opens]:
    """Watch a file."""
    descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    try:
        assert _libc.inotify_add_watch(descriptor, bytes(path), _IN_OPEN) >= 0
        yield Opens(descriptor)
    finally:
        os.close(descriptor)
