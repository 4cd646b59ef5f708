"""What there is before and after: memory, segments, file handles, tasks, processes."""

import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.transfer.arena.file import NAME_PATTERN
from tests.chaos.fleet import Fleet
from tests.open_files import open_files

GROWTH_MIB = 64
"""Growth of a process's memory that counts as a leak. Allocators keep what they had."""

OF_PYTHON = "python"
"""What the kernel calls Python's threads."""

LATE_THREADS = min(32, (os.cpu_count() or 1) + 4) - 1
"""A worker's pool for what blocks makes its threads as they are needed, so many after the first."""

SPARE = {"/": "/dev/null"}
"""libuv keeps a handle in reserve, on the one at first and on the other once it was needed."""

Census = dict[str, float]


async def take(fleet: Fleet) -> Census:
    """Everything that must not grow, by name. Requests must have ended."""
    found: Census = {}
    for frontend in fleet.frontends:
        metrics = await frontend.metrics()
        for what in ("arena_leases", "inflight_requests"):
            found[f"frontend {frontend.name}: {what}"] = metrics[f"mmrouter_{what}"]
        views = await fleet.views(frontend)
        active = sum(view["active_requests"] for view in views)
        found[f"frontend {frontend.name}: requests at workers"] = active
    survivor = fleet.survivor
    report = await survivor.report()
    found["frontend a: tasks"] = report.tasks
    found |= _process("frontend a", survivor.process.pid)
    del found[f"frontend a: threads {OF_PYTHON}"]  # which are known by better names
    for thread, number in report.threads.items():
        found[f"frontend a: threads {thread}"] = number
    for kind, number in report.sockets.items():
        found[f"frontend a: ZeroMQ sockets {kind}"] = number
    found |= _process("worker w0", fleet.workers[0].pid)
    found |= _process("engine of w0", fleet.workers[0].engine_pid)
    found["workers: requests in engines"] = sum(
        (view["running"] or 0) + (view["waiting"] or 0) for view in await fleet.views(survivor)
    )
    found["arenas of dead frontends"] = sum(not psutil.pid_exists(each.owner) for each in arenas())
    return found


def _process(name: str, pid: int) -> Census:
    process = psutil.Process(pid)
    found: Census = {f"{name}: memory, MiB": process.memory_full_info().uss / 2**20}
    for kind, number in _handles(pid).items():
        found[f"{name}: {kind} handles"] = number
    for thread, number in _threads(pid).items():
        found[f"{name}: threads {thread}"] = number
    return found


def _handles(pid: int) -> Counter[str]:
    """Open files by kind: socket, pipe, anon_inode:[eventfd], and files by path, without what is
    different in another process."""
    kinds: Counter[str] = Counter()
    for target in open_files(pid).values():
        name = re.sub(r":\[\d+\]$", "", SPARE.get(str(target), str(target)))
        kinds[re.sub(r"[0-9a-f]{6,}|\d+", "*", name)] += 1
    return kinds


def _threads(pid: int) -> Counter[str]:
    """Threads by name, without the numbers that pools give them."""
    names: Counter[str] = Counter()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):
            names[(thread / "comm").read_text().strip().rstrip("0123456789_-")] += 1
    return names


@dataclass(frozen=True)
class Arena:
    name: str
    owner: int


def arenas() -> list[Arena]:
    """Those in shared memory, with the processes that own them."""
    found = []
    for path in Path("/dev/shm").iterdir():
        if match := re.fullmatch(NAME_PATTERN, path.name):
            found.append(Arena(path.name, int(match[1])))
    return found


def grown(before: Census, after: Census) -> list[str]:
    """Names of what there is more of."""
    return [name for name, value in after.items() if value - before.get(name, 0) > _tolerated(name)]


def _tolerated(name: str) -> int:
    if name.endswith("MiB"):
        return GROWTH_MIB
    return LATE_THREADS if name == f"worker w0: threads {OF_PYTHON}" else 0


def processes_left() -> list[str]:
    """Processes but for this one and those that run all the time. Needs a namespace of processes
    of our own."""
    this = psutil.Process()
    ours = {this, *this.parents()}
    return [
        " ".join(process.cmdline())[:80] or process.name()
        for process in psutil.process_iter()
        if process not in ours and process.status() != psutil.STATUS_ZOMBIE
    ]
