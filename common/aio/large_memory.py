"""Give large pieces of memory back to the system as soon as they are free."""

import ctypes
from typing import Final

LARGE: Final = 8 << 20
"""Bytes of a piece that is mapped by itself. Pillow's have 16 MiB."""

_M_MMAP_THRESHOLD: Final = -3


def give_back_large_memory() -> None:
    """Keep glibc from raising its threshold to 32 MiB when it sees large pieces freed.

    Above it, pictures lie in the heaps of threads, where a small piece behind them keeps them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE)
