"""Pictures leave nothing behind, whatever else was taken meanwhile."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.transfer import pages

SCRIPT = """
import ctypes
from pathlib import Path
from common.transfer.pages import give_back_large_memory

give_back_large_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def take(count):
    taken = []
    for _ in range(count):
        taken.append(libc.malloc(16 << 20))
        ctypes.memset(taken[-1], 1, 16 << 20)
        libc.malloc(100_000)  # which stays
    for each in taken:
        libc.free(each)


for _ in range(2):
    take(20)
lines = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) // 1024 for line in lines if line.startswith("RssAnon")))
"""


def test_large_pieces_are_given_back() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 100


KEPT = """
import ctypes
from common.transfer.pages import LARGE, give_back_large_memory

give_back_large_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]

piece = libc.malloc(LARGE - 4096)
end = libc.sbrk(0)
libc.free(piece)
print(end - libc.sbrk(0))
"""


def test_the_next_picture_finds_the_pages_of_the_last() -> None:
    ran = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == 0, "bytes went back to the system"


@pytest.mark.parametrize(("limit", "usable"), [("1048576\n", 1 << 20), ("max\n", None)])
def test_a_container_has_the_memory_that_it_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usable: int | None
) -> None:
    given = tmp_path / "memory.max"
    monkeypatch.setattr(pages, "_CONTAINER_LIMIT", given)
    whole = pages.usable_memory()
    given.write_text(limit)
    assert pages.container_memory() == usable
    assert pages.usable_memory() == (usable or whole)
