import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from common.transfer.arena.arena import Arena
from common.transfer.arena.file import SHARED_MEMORY
from tests.open_files import open_files

MEGABYTE = 1 << 20


def open_descriptors() -> Counter[str]:
    """What this process has open, arenas and page tables only. Not by number: what a module's
    tests share may be made anew meanwhile.
    """
    targets = map(str, open_files().values())
    return Counter(target for target in targets if "mmrouter" in target or "pagemap" in target)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test leaves a file of this process in shared memory, or a descriptor."""
    own = f"mmrouter-*-{os.getpid()}-*"
    files, descriptors = set(SHARED_MEMORY.glob(own)), open_descriptors()
    yield

    def left() -> set[object]:
        return {*set(SHARED_MEMORY.glob(own)) - files, *open_descriptors() - descriptors}

    patience = time.monotonic() + 30
    while left() and time.monotonic() < patience:
        gc.collect()
        time.sleep(0.01)  # a thread may be just done with what it copied from
    assert not left()


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
