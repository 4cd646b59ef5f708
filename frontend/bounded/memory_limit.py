"""Limit the memory of this process while it works on a client's medium."""

import os
import resource
from pathlib import Path
from typing import Final, Self

from common.errors import causes

_STATM: Final = Path("/proc/self/statm")
_PRIVATE: Final = 5
"""Field of private, writable pages, which the kernel compares with the limit. Memory shared with
the frontend, as the arena is, does not count."""

_SAID: Final = ("allocate memory", "not enough memory", "Insufficient memory", "bad_alloc")
"""Messages of PyTorch, OpenCV and C++ in errors that are no MemoryError."""


class MemoryLimit:
    """Limit of this process's memory while entered: ``nbytes`` beyond its use at entry."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def grow(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._set(self._base + self._nbytes)

    def __enter__(self) -> Self:
        self._base = private_bytes()
        self._set(self._base + self._nbytes)
        return self

    def __exit__(self, *_: object) -> None:
        self._set(resource.RLIM_INFINITY)

    @staticmethod
    def _set(nbytes: int) -> None:
        """Set the soft limit: the hard one belongs to the caller's environment."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = {nbytes, hard} - {resource.RLIM_INFINITY}
        resource.setrlimit(
            resource.RLIMIT_DATA, (min(wanted, default=resource.RLIM_INFINITY), hard)
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in Python or in a library."""
    return any(
        isinstance(each, MemoryError) or any(said in str(each) for said in _SAID)
        for each in causes(error)
    )


def private_bytes() -> int:
    """Return the bytes of this process's own memory, used or not."""
    return int(_STATM.read_text().split()[_PRIVATE]) * os.sysconf("SC_PAGE_SIZE")
