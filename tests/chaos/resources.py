"""What processes and directories have: the parts of a census, by kind and number."""

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from tests.open_files import open_files

Census = dict[str, float]
"""How much there is of each kind, by name."""

MEMORY: Final = "memory, MiB"

UNNAMED: Final = "without a name"
"""Threads that bear the name of their process: Python's own, and those of native libraries."""

_SAME_FILE: Final = {"/": "/dev/null"}
"""libuv keeps a handle in reserve, on the one at first and on the other once it was needed."""

_NUMBERS: Final = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # a UUID
    r"|(?:^tmp|(?<=-))[a-z0-9_]{8}(?=/|$)"  # a temporary file or a semaphore of Python
    r"|[0-9a-f]{6,}|\d+"
)

_ROLES: Final = {
    "EngineCore": "engine",
    "nixl_processes": "NIXL process",
    "aio.fork_server": "media process",
    "resource_tracker": "resource tracker",
    "a spare process": "spare process",
}
"""By a part of the command line."""


def of_tree(name: str, pid: int, names: Mapping[int, str] = {}) -> Census:
    """Resources of a process and its descendants, summed over processes of the same role.

    Zombies are counted: their parents have to reap them.

    Args:
        name: of the process, and the beginning of its descendants' names.
        names: of some of them by pid; other descendants are named by their command lines.
    """
    found: Counter[str] = Counter()
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            if process.status() == psutil.STATUS_ZOMBIE:
                found[f"{name}: zombies"] += 1
                continue
            usual = name if process == root else f"{name}: {_role(process)}"
            role = names.get(process.pid, usual)
            found.update(of_process(role, process.pid))
            found[f"{role}: processes"] += 1
    return dict(found)


def of_process(name: str, pid: int) -> Census:
    """Memory, file handles and threads of one process."""
    found: Census = {f"{name}: {MEMORY}": memory_mib(pid)}
    for kind, number in _handles(pid).items():
        found[f"{name}: {kind} handles"] = number
    for thread, number in _threads(pid).items():
        found[f"{name}: threads {thread}"] = number
    return found


def memory_mib(pid: int) -> float:
    """Anonymous memory, swapped or not.

    Two things let the unique set size (USS) grow that are no leaks: a forked process that writes
    to a page of its parent, as every reference count does, and other users of an arena that leave.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(kib) for kib in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+)", status, re.M)) / 1024


def files(directory: Path) -> Census:
    """Entries of a directory and of those below it, by kind."""
    entries = (entry.relative_to(directory) for entry in directory.rglob("*"))
    return dict(Counter(without_numbers(str(entry)) for entry in entries))


def without_numbers(name: str) -> str:
    """A name without what differs between things of one kind."""
    return _NUMBERS.sub("*", name)


def command(process: psutil.Process) -> str:
    """Return the command line, or the name of a process that has none, as a zombie."""
    with suppress(psutil.ZombieProcess):
        return " ".join(process.cmdline()) or process.name()
    return f"{process.name()}, a zombie"


def _role(process: psutil.Process) -> str:
    line = command(process)
    for part, role in _ROLES.items():
        if part in line:
            return role
    return without_numbers(line)[:80]


def _handles(pid: int) -> Counter[str]:
    """Open files by kind: socket, pipe, anon_inode:[eventfd], and files by path."""
    kinds: Counter[str] = Counter()
    for target in open_files(pid).values():
        name = re.sub(r":\[\d+\]$", "", _SAME_FILE.get(str(target), str(target)))
        kinds[without_numbers(name)] += 1
    return kinds


def _threads(pid: int) -> Counter[str]:
    """Threads by name, without the numbers that pools give them."""
    names: Counter[str] = Counter()
    process = Path(f"/proc/{pid}/comm").read_text()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            name = (thread / "comm").read_text()
            names[UNNAMED if name == process else name.strip().rstrip("0123456789_-")] += 1
    return names
