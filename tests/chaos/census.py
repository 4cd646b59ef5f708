"""What there is before and after the faults, and once everybody has left."""

import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from common.transfer.arena.layout import NAME_PATTERN
from tests.chaos.fleet import Fleet
from tests.chaos.planted import IN_SHARED_MEMORY, SHARED_MEMORY, TEMPORARY
from tests.chaos.report import Report
from tests.chaos.resources import MEMORY, UNNAMED, Census, command, files, of_tree

GROWTH_MIB: Final = 64
"""Growth of a process's memory that counts as a leak. Allocators keep what they had."""

STEADY_MIB: Final = 8
WARM_ROUNDS: Final = 8

LATE_THREADS: Final = min(32, (os.cpu_count() or 1) + 4) - 1
"""A worker's pool for what blocks makes its threads as they are needed, so many after the first."""

LATE_POOL: Final = "worker w0: threads asyncio"

SEMAPHORES: Final = f"{IN_SHARED_MEMORY}: sem.mp-*"
MEETING_PLACES: Final = f"{TEMPORARY}: vllm_dist_*"

COMPILED: Final = f"{TEMPORARY}: torchinductor_"
"""The compiler's cache, which is meant to stay."""

WHILE_BUSY: Final = (
    "arena_leases",
    "inflight_requests",
    "request_body_bytes",
    "media_held_bytes",
    "media_held_pixels",
    "preprocess_waiting",
)
"""Metrics of a frontend that are zero without requests."""


async def warm(load: Callable[[], Awaitable[object]], measure: Callable[[], Census]) -> None:
    """Repeat a load until memory stays as it is.

    An engine takes 80 MiB with its first pictures and a few for the next thousands. What still
    grows after many rounds leaks: then it grows on, and is counted later.

    Args:
        measure: the memory of all that works, by name.
    """
    before = measure()
    for _ in range(WARM_ROUNDS):
        await load()
        after = measure()
        if all(value - before.get(name, 0) <= STEADY_MIB for name, value in after.items()):
            return
        before = after


def memory(fleet: Fleet) -> Census:
    """The memory of frontends and workers."""
    found: Census = {}
    for frontend in fleet.frontends:
        found |= of_tree(f"frontend {frontend.name}", frontend.process.pid)
    for worker in fleet.workers:
        found |= of_tree(worker.name, worker.process.pid)
    return {name: value for name, value in found.items() if name.endswith(MEMORY)}


async def take(fleet: Fleet) -> Census:
    """Everything that must not grow, by name. Requests must have ended."""
    found: Census = {}
    for frontend in fleet.frontends:
        views = await fleet.views(frontend)
        found |= of_frontend(frontend.name, await frontend.metrics(), views)
    survivor, worker = fleet.survivor, fleet.workers[0]
    pid = survivor.process.pid
    found |= reported("frontend a", of_tree("frontend a", pid), await survivor.report())
    names = {worker.process.pid: "worker w0: parent", worker.pid: "worker w0"}
    of_worker = of_tree("worker w0", worker.process.pid, names)
    found |= reported("worker w0", of_worker, await worker.report())
    found["arenas of dead frontends"] = sum(not psutil.pid_exists(each.owner) for each in arenas())
    return found | files_left() | {f"cards: {name}": n for name, n in files(fleet.cards).items()}


def files_left() -> Census:
    """Files in the directories that all processes share."""
    directories = {IN_SHARED_MEMORY: SHARED_MEMORY, TEMPORARY: Path(tempfile.gettempdir())}
    found = {
        f"{what}: {name}": n for what, d in directories.items() for name, n in files(d).items()
    }
    return {name: n for name, n in found.items() if not name.startswith(COMPILED)}


def of_frontend(
    name: str, metrics: Mapping[str, float], views: Sequence[Mapping[str, Any]]
) -> Census:
    """What a frontend has of requests and workers, as it says itself."""
    found = {f"frontend {name}: {what}": metrics[f"mmrouter_{what}"] for what in WHILE_BUSY}
    found[f"frontend {name}: workers"] = len(views)
    of_views = {"active_requests": "at workers", "running": "running", "waiting": "waiting"}
    for field, what in of_views.items():
        found[f"frontend {name}: requests {what}"] = sum(view[field] or 0 for view in views)
    return found


def reported(name: str, found: Census, report: Report) -> Census:
    """A census with what a process says of itself: its threads have better names there."""
    threads = {f"{name}: threads {thread}": n for thread, n in report.threads.items()}
    sockets = {f"{name}: ZeroMQ sockets {kind}": n for kind, n in report.sockets.items()}
    others = found.get(f"{name}: threads {UNNAMED}", 0) - sum(report.threads.values())
    return (
        found
        | {f"{name}: tasks": report.tasks, f"{name}: threads {UNNAMED}": others}
        | threads
        | sockets
    )


@dataclass(frozen=True)
class Arena:
    name: str
    owner: int


def arenas() -> list[Arena]:
    """Those in shared memory, with the processes that own them."""
    found = []
    for path in SHARED_MEMORY.iterdir():
        if match := re.fullmatch(NAME_PATTERN, path.name):
            found.append(Arena(path.name, int(match[1])))
    return found


def grown(before: Census, after: Census) -> list[str]:
    """Names of what there is more of."""
    return [name for name, value in after.items() if value - before.get(name, 0) > _tolerated(name)]


def with_left_by_killed(before: Census, engines: int, groups: int) -> Census:
    """A census with what engines leave that are killed.

    Args:
        engines: that ended while they were disturbed. vLLM leaves a file of 2 KiB for each that is
            killed, where ranks would meet.
        groups: of processes that were killed at once. Each worker has a semaphore of tqdm's, which
            Python's resource tracker removes, unless it was killed as well.
    """
    return before | {
        MEETING_PLACES: before.get(MEETING_PLACES, 0) + engines,
        SEMAPHORES: before.get(SEMAPHORES, 0) + groups,
    }


def _tolerated(name: str) -> int:
    if name.endswith(MEMORY):
        return GROWTH_MIB
    return LATE_THREADS if name == LATE_POOL else 0


def left(before: Census, running: Iterable[int | None]) -> list[str]:
    """Processes and files that are there although everybody has left.

    Needs namespaces of our own.

    Args:
        before: the files there when nobody had come yet.
        running: pids of processes that run all the time, besides this one and its parents.
    """
    this = psutil.Process()
    known = {this.pid, *(parent.pid for parent in this.parents()), *running}
    found: list[str] = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if process.pid not in known:
                found.append(f"process {command(process)[:80]}")
    return found + grown(before, files_left())
