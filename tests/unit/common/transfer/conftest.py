import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.transfer.arena import Arena
from common.transfer.arena_file import SHARED_MEMORY

MEGABYTE = 1 << 20


def open_descriptors() -> set[str]:
    """What this process has open, arenas and page tables only."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        if "mmrouter" in target or "pagemap" in target:
            found.add(f"{link.name} {target}")
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test leaves a file of this process in shared memory, or a descriptor."""
    own = f"mmrouter-*-{os.getpid()}-*"
    files, descriptors = set(SHARED_MEMORY.glob(own)), open_descriptors()
    yield
    if open_descriptors() - descriptors:
        gc.collect()
    assert set(SHARED_MEMORY.glob(own)) <= files
    assert open_descriptors() <= descriptors


@pytest.fixture
def make_arena() -> Iterator[Callable[..., Arena]]:
    """Makes arenas, of one megabyte unless told, and closes them."""
    made = []

    def make(size: int = MEGABYTE, **options: object) -> Arena:
        arena = Arena(size, **options)  # type: ignore[arg-type] # passed through
        made.append(arena)
        return arena

    yield make
    for arena in made:
        arena.close()
