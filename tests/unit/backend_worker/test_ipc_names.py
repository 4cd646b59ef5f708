"""What killed engines leave in shared memory, and sockets."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.utils.network_utils import get_open_zmq_ipc_path

from backend_worker.engine.ipc_names import (
    SHARED_MEMORY,
    instance_name,
    make_socket_directory,
    reap_memory,
    remove_memory,
)


def memory(instance: str, rank: int = 0) -> Path:
    file = SHARED_MEMORY / f"vllm_ec_{instance}_dp{rank}.mmap"
    file.touch()
    return file


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


@pytest.fixture(autouse=True)
def nothing_stays(gone: int) -> Iterator[None]:
    yield
    for file in SHARED_MEMORY.glob(f"vllm_ec_mmrouter-*-{os.getpid()}_dp*"):
        file.unlink()
    for file in SHARED_MEMORY.glob(f"vllm_ec_*{gone}*"):
        file.unlink()


def test_that_of_a_worker_is_removed_and_no_others(gone: int) -> None:
    ranks = [memory(instance_name(gone), rank) for rank in range(3)]
    others = [memory(instance_name(os.getpid())), memory(f"{instance_name(gone)}1")]
    remove_memory(gone)
    assert not any(file.exists() for file in ranks)
    assert all(file.exists() for file in others)


def test_who_starts_removes_that_of_workers_that_are_gone(gone: int) -> None:
    dead = memory(instance_name(gone))
    alive = memory(instance_name(os.getpid()))
    elsewhere = memory(f"mmrouter-1-{gone}")  # another container's, which sees other processes
    vllms = memory(f"{gone}")
    reap_memory()
    assert not dead.exists()
    assert alive.exists() and elsewhere.exists() and vllms.exists()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")  # put back in the end
        monkeypatch.delenv("VLLM_RPC_BASE_PATH")
        yield Path(directory)


def test_sockets_go_with_their_worker(temporary: Path) -> None:
    make_socket_directory()
    sockets = Path(os.environ["VLLM_RPC_BASE_PATH"])
    (sockets / "socket").touch()
    other = temporary / f"{instance_name(os.getpid())}1-abcdefgh"
    other.mkdir()
    assert get_open_zmq_ipc_path().startswith(f"ipc://{sockets}/")
    remove_memory(os.getpid())
    assert list(temporary.iterdir()) == [other]


def test_sockets_of_workers_that_are_gone_are_removed(temporary: Path, gone: int) -> None:
    make_socket_directory()
    alive = Path(os.environ["VLLM_RPC_BASE_PATH"])
    dead, elsewhere, users = (
        temporary / f"{name}-abcdefgh"
        for name in (instance_name(gone), f"mmrouter-1-{gone}", "mmrouter-root")
    )
    for directory in (dead, elsewhere, users):
        directory.mkdir()
        (directory / "socket").touch()
    reap_memory()
    assert sorted(temporary.iterdir()) == sorted([alive, elsewhere, users])


def test_a_directory_for_sockets_that_the_user_chose_is_kept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/somewhere")
    make_socket_directory()
    assert os.environ["VLLM_RPC_BASE_PATH"] == "/somewhere"
    assert list(temporary.iterdir()) == []


def test_sockets_whose_names_would_be_too_long_are_made_as_vllm_does(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 40)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    make_socket_directory()
    assert "VLLM_RPC_BASE_PATH" not in os.environ
    assert list(long.iterdir()) == []
