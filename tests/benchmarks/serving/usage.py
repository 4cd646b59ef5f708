"""CPU time and memory of a contender's processes, by their role."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import psutil

from tests.benchmarks.serving.contenders import Role

ByRole = Mapping[Role, float]


class Usage:
    """Of the processes below some roots.

    Args:
        roots: pids by role; what they started has their role too, but for engines.
        engines: pids.
    """

    def __init__(self, roots: Mapping[Role, Sequence[int]], engines: Collection[int]) -> None:
        self._processes: dict[Role, list[psutil.Process]] = {role: [] for role in roots}
        self._processes[Role.ENGINE] = []
        for role, pids in roots.items():
            for pid in pids:
                root = psutil.Process(pid)
                for each in (root, *root.children(recursive=True)):
                    self._processes[Role.ENGINE if each.pid in engines else role].append(each)

    def cpu_seconds(self) -> dict[Role, float]:
        """So far."""
        return {role: sum(map(_cpu_seconds, each)) for role, each in self._processes.items()}

    def memory_mb(self) -> dict[Role, float]:
        """What processes share is divided among them."""
        return {role: sum(map(_memory_mb, each)) for role, each in self._processes.items()}


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
