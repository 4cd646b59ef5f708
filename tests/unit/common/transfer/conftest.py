import gc
import os
from collections.abc import Callable, Iterator

import pytest

from common.transfer.arena import Arena
from common.transfer.arena_file import SHARED_MEMORY
from tests.open_files import open_files

MEGABYTE = 1 << 20


def open_descriptors() -> set[str]:
    """What this process has open, arenas and page tables only."""
    return {
        f"{number} {target}"
        for number, target in open_files().items()
        if "mmrouter" in str(target) or "pagemap" in str(target)
    }


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
