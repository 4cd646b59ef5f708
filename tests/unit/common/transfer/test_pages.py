import mmap
import os
from pathlib import Path

import pytest

from common.transfer import pages
from common.transfer.pages import PrivatePages, address_of, populate, private_memory

PAGE = mmap.PAGESIZE


def private_mapping(tmp_path: Path, count: int) -> memoryview:
    path = tmp_path / "file"
    path.write_bytes(bytes(count * PAGE))
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def test_written_pages_are_found_and_dropped(tmp_path: Path) -> None:
    memory = private_mapping(tmp_path, 8)
    private = PrivatePages()
    assert private.restore(memory) == 0
    memory[5], memory[3 * PAGE] = 1, 1
    assert private.restore(memory[PAGE:]) == 1
    assert (memory[5], memory[3 * PAGE]) == (1, 0)
    assert private.restore(memory) == 1
    assert private.restore(memory) == 0
    assert not any(memory)
    private.close()
    private.close()


def test_without_the_page_table_every_range_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        private = PrivatePages()
    memory = private_mapping(tmp_path, 2)
    memory[5] = 1
    assert private.restore(memory) == 0
    assert memory[5] == 0


@pytest.mark.parametrize("for_writing", [False, True])
def test_populate(for_writing: bool) -> None:
    memory = private_memory(3 * PAGE)
    assert address_of(memory) % PAGE == 0
    assert populate(memory, for_writing=for_writing)
    assert not any(memory)


def test_a_kernel_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 9999)
    assert not populate(private_memory(PAGE), for_writing=True)


def test_a_forked_child_does_not_get_private_memory() -> None:
    memory = private_memory(PAGE)
    rows = Path("/proc/self/smaps").read_text()
    start = f"{address_of(memory):x}-"
    flags = rows[rows.index(start) :].partition("VmFlags:")[2].partition("\n")[0]
    assert "dc" in flags.split()
