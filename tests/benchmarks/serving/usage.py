"""CPU time and memory of a contender's processes, by their role."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import psutil

from tests.benchmarks.serving.contenders import Role

ByRole = Mapping[Role, float]


_ENGINE: Final = "EngineCore"
"""In the title of every process in which an engine computes."""

_SPARE: Final = "a spare process of a test"
"""The title of one that was forked in case it is needed; see ``tests/e2e/fork_server.py``."""


class Usage:
    """Of the processes below some roots.

    Args:
        roots: pids by role; what they started has their role too, but for engines.
    """

    def __init__(self, roots: Mapping[Role, Sequence[int]]) -> None:
        self._processes: dict[Role, list[psutil.Process]] = {role: [] for role in roots}
        self._processes[Role.ENGINE] = []
        for role, pids in roots.items():
            for pid in pids:
                root = psutil.Process(pid)
                for each in (root, *root.children(recursive=True)):
                    title = _title(each)
                    if title != _SPARE:
                        its = Role.ENGINE if _ENGINE in title else role
                        self._processes[its].append(each)

    def cpu_seconds(self) -> dict[Role, float]:
        """So far."""
        return {role: sum(map(_cpu_seconds, each)) for role, each in self._processes.items()}

    def memory_mb(self) -> dict[Role, float]:
        """What processes share is divided among them."""
        return {role: sum(map(_memory_mb, each)) for role, each in self._processes.items()}


def _title(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()).strip()
    return ""


def _cpu_seconds(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _memory_mb(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        return float(process.memory_full_info().pss) / 2**20
    return 0.0


def used(before: ByRole, now: ByRole) -> dict[Role, float]:
    """CPU seconds between two readings."""
    return {role: now[role] - before[role] for role in now}
