import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ArenaUnavailableError
from common.transfer.arena import file as arena_file
from common.transfer.arena.file import ArenaMapping, create, new_name, reap_orphans
from common.transfer.arena.layout import NAME_PATTERN, ArenaOffer


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave_behind(directory: Path, pid: int, ticks: int) -> Path:
    path = directory / f"mmrouter-arena-{pid}-{ticks}-{'0' * 16}"
    path.touch()
    return path


def test_names_tell_pid_and_start_and_are_unique() -> None:
    match = re.fullmatch(NAME_PATTERN, new_name())
    assert match
    assert int(match[1]) == os.getpid()
    assert new_name() != new_name()


def test_all_memory_is_allocated_and_private(tmp_path: Path) -> None:
    path = tmp_path / new_name()
    descriptor = create(path, 100_000)
    try:
        status = path.stat()
        assert status.st_size == 100_000
        assert status.st_blocks * 512 >= 100_000
        assert status.st_mode & 0o777 == 0o600
        with pytest.raises(ArenaUnavailableError):
            create(path, 100_000)
    finally:
        os.close(descriptor)


def test_no_room_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(ArenaUnavailableError, match=r"5\.00 GB.*not that much room"):
        create(tmp_path / "x", 5_000_000_000)
    assert not list(tmp_path.iterdir())


def test_arenas_of_dead_owners_are_removed(tmp_path: Path) -> None:
    gone = leave_behind(tmp_path, dead_pid(), 5)
    # The pid was given to another process since.
    reused = leave_behind(tmp_path, os.getpid(), 5)
    assert reap_orphans(tmp_path) == 2
    assert not gone.exists()
    assert not reused.exists()


def test_living_owners_and_other_files_are_left_alone(tmp_path: Path) -> None:
    descriptor = create(tmp_path / new_name(), 4096)
    for name in ("mmrouter-arena-1-x", "mmrouter-arena-", "psm_123", "mmrouter-arena-1-2-3.bak"):
        (tmp_path / name).touch()
    try:
        assert reap_orphans(tmp_path) == 0
        assert len(list(tmp_path.iterdir())) == 5
    finally:
        os.close(descriptor)


REAP = """
import sys
from pathlib import Path
from common.transfer.arena import reap_orphans
assert reap_orphans(Path(sys.argv[1])) == 1
"""


def test_nobody_waits_for_what_another_user_put_under_an_arenas_name(tmp_path: Path) -> None:
    pipe = tmp_path / f"mmrouter-arena-{dead_pid()}-5-{'0' * 16}"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ArenaUnavailableError, match="not a file of this user"):
        ArenaMapping.open(
            ArenaOffer(name=pipe.name, size=1 << 20, generation=1, nonce="00" * 32), tmp_path
        )
    # In a process that can be ended, as a start that waits for a writer never does.
    subprocess.run([sys.executable, "-c", REAP, str(tmp_path)], check=True, timeout=120)
    assert not pipe.exists()


def test_an_owner_whose_pid_cannot_be_seen_keeps_its_arena(tmp_path: Path) -> None:
    """It holds the lock: a container with its own PID namespace, say."""
    path = leave_behind(tmp_path, dead_pid(), 5)
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert reap_orphans(tmp_path) == 0
    finally:
        os.close(descriptor)
    assert reap_orphans(tmp_path) == 1


def test_another_reaper_was_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = leave_behind(tmp_path, dead_pid(), 5)

    def unlink_meanwhile(_: int) -> None:
        path.unlink()

    monkeypatch.setattr(arena_file, "_start_ticks", unlink_meanwhile)
    assert reap_orphans(tmp_path) == 0


def test_a_link_in_place_of_an_arena_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    (tmp_path / f"mmrouter-arena-{dead_pid()}-5-{'0' * 16}").symlink_to(target)
    assert reap_orphans(tmp_path) == 0
    assert target.exists()
