"""What killed engines leave in shared memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend_worker.engine_memory import (
    SHARED_MEMORY,
    instance_name,
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
