"""Memory operations that Python lacks."""

import contextlib
import ctypes
import logging
import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np

logger = logging.getLogger(__name__)

LARGE: Final = 8 << 20  # bytes of a piece that is mapped by itself. Pillow's have 16 MiB

KEPT: Final = 2 * LARGE
"""Bytes at the end of a thread's heap that stay: the tensors and pixels of the next picture."""

_CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def give_back_large_memory() -> None:
    """Keep glibc from raising its mmap threshold to 32 MiB when large blocks are freed. Above it,
    pictures are in threads' heaps, where a small block behind them keeps them. A fixed threshold
    also fixes that of trimming, at 128 KiB: each picture would get new pages.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        mallopt(_M_TRIM_THRESHOLD, KEPT)


def container_memory() -> int | None:
    """Return the bytes that this container may take, shared memory included; None if no limit."""
    with contextlib.suppress(OSError, ValueError):
        return int(_CONTAINER_LIMIT.read_text())  # "max" where there is none
    return None


def usable_memory() -> int:
    """Return the bytes of this machine's memory, or of its part for this container."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, container_memory() or physical)


# asm-generic/mman-common.h
_MADV_DONTNEED: Final = 4
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23

# Documentation/admin-guide/mm/pagemap.rst
_PRESENT: Final = 1 << 63
_SWAPPED: Final = 1 << 62
_FILE_OR_SHARED: Final = 1 << 61

_STEP: Final = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def private_memory(size: int) -> memoryview:
    """Return zeroed, page-aligned, private memory for a network card to write to."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked child would otherwise get the card's pages, and this process their copies.
    area.madvise(mmap.MADV_DONTFORK)
    try:
        # Saves a good part of a copy's time.
        area.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        logger.debug("no huge pages: %s", error)
    return memoryview(area)


def populate(view: memoryview, *, for_writing: bool) -> bool:
    """Map all pages of page-aligned memory now, so that no later access faults.

    Takes about 0.1 s per GB once the memory is allocated, without the GIL. ``for_writing`` on a
    private mapping would copy every page. Return False where the kernel (before 5.14) can't; then
    pages are mapped on first access.
    """
    advice = _MADV_POPULATE_WRITE if for_writing else _MADV_POPULATE_READ
    start, size = address_of(view), view.nbytes
    for offset in range(0, size, _STEP):
        if _libc.madvise(start + offset, min(_STEP, size - offset), advice):
            logger.info("pages are not prefaulted: %s", os.strerror(ctypes.get_errno()))
            return False
    return True


class PrivatePages:
    """Finds and drops written pages of a private mapping, which would hide the owner's later
    writes. Nothing should write here; a stray write must harm only its own process."""

    def __init__(self) -> None:
        # Missing in a few sandboxes; then every range counts as written to.
        try:
            self._pagemap: int | None = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            logger.info("can't read /proc/self/pagemap: %s", error)
            self._pagemap = None

    def close(self) -> None:
        """Close the page map; later restores drop pages unconditionally."""
        if self._pagemap is not None:
            os.close(self._pagemap)
            self._pagemap = None

    def restore(self, view: memoryview) -> int:
        """Make a page-aligned range show the owner's bytes again, in about 16 us per MB; return the
        number of private pages, 0 if unknown."""
        address = address_of(view)
        written = self._count_private(address, view.nbytes)
        if written == 0:
            return 0
        _libc.madvise(address, view.nbytes, _MADV_DONTNEED)
        return written or 0

    def _count_private(self, address: int, size: int) -> int | None:
        if self._pagemap is None:
            return None
        pages = -(-size // mmap.PAGESIZE)
        entries = os.pread(self._pagemap, 8 * pages, address // mmap.PAGESIZE * 8)
        if len(entries) != 8 * pages:
            return None
        flags = np.frombuffer(entries, dtype=np.uint64)
        in_use = (flags & np.uint64(_PRESENT | _SWAPPED)) != 0
        return int(np.count_nonzero(in_use & ((flags & np.uint64(_FILE_OR_SHARED)) == 0)))
