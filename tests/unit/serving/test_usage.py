"""What the serving benchmark measures of processes, by their role."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.benchmarks.serving.contenders import Role
from tests.benchmarks.serving.usage import Usage, used

WORKS = "sum(range(3_000_000)); print(); import sys; sys.stdin.read()"


@pytest.fixture
def pids() -> Iterator[dict[str, int]]:
    """Two processes that have worked, one of which says that an engine computes in it."""
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", WORKS, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for name in ("EngineCore", "server")
    }
    try:
        for each in processes.values():
            assert each.stdout and each.stdout.readline()
        yield {name: each.pid for name, each in processes.items()}
    finally:
        for each in processes.values():
            each.communicate()


def test_an_engine_counts_by_itself_whoever_started_it(pids: dict[str, int]) -> None:
    usage = Usage({Role.API_SERVER: list(pids.values())})
    cpu, memory = usage.cpu_seconds(), usage.memory_mb()
    assert set(cpu) == set(memory) == {Role.API_SERVER, Role.ENGINE}
    assert all(cpu.values()) and all(memory.values())
    assert used(cpu, cpu) == {Role.API_SERVER: 0.0, Role.ENGINE: 0.0}
