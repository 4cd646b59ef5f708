"""Start and confinement of the processes with a NIXL agent.

A peer that reaches an agent's port over TCP may take over its process. So the process has no
secrets, can't open files, can't trace or signal outside processes, and ends with its parent.
"""

import ctypes
import importlib.util
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import Final

import msgspec

from common.aio.processes import end_with_parent

# linux/prctl.h
_PR_SET_NO_NEW_PRIVS: Final = 38

# asm-generic/unistd.h, the same for all architectures; linux/landlock.h
_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_ADD_RULE: Final = 445
_LANDLOCK_RESTRICT_SELF: Final = 446
_LANDLOCK_CREATE_RULESET_VERSION: Final = 1
_LANDLOCK_RULE_PATH_BENEATH: Final = 1
_ALL_FILE_ACCESS: Final = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
_LIST: Final = 1 << 3
_READ_AND_RUN: Final = (1 << 0) | (1 << 2) | _LIST
_READ_AND_WRITE: Final = (1 << 1) | (1 << 2) | _LIST
_SCOPES: Final = 0b11  # Abstract Unix sockets and signals, from version 6 on

_LIBRARIES: Final = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/sys")
_OF_THE_SYSTEM: Final = ("self", "sys", "cpuinfo", "meminfo", "stat")
"""Of /proc: not what it says of other processes, whose arguments may be secret."""
_PACKAGES: Final = ("nixl", "numpy")
_DEVICES: Final = ("/dev/infiniband", "/dev/null", "/dev/zero", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


class Start(msgspec.Struct, frozen=True):
    """Arguments of the process.

    Attributes:
        channel: descriptor of the socket to its parent.
        memory: descriptor of the memory that peers read, or that reads write to.
        size: bytes of it.
        error_handling: UCX's treatment of a dead peer.
        needs_files: whether UCX opens files for each new peer.
        parent: process id.
        torch_has_cuda: whether PyTorch here is built for CUDA.
        writable: whether the memory must be mapped for writing.
    """

    channel: int
    memory: int
    size: int
    error_handling: str
    needs_files: bool
    parent: int
    torch_has_cuda: bool
    writable: bool

    def argument(self) -> str:
        """Encode for the command line."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, argument: str) -> "Start":
        return msgspec.json.decode(argument, type=cls)

    def socket(self) -> socket.socket:
        return socket.socket(fileno=self.channel)


def begin(start: Start) -> None:
    """Run first: end with the parent, and leave no core dump."""
    end_with_parent(signal.SIGKILL)
    if orphaned(start):
        raise SystemExit(0)
    # Ctrl-C is meant for the parent, which then stops this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not start.torch_has_cuda:
        # NIXL would import it, for a second, to learn its CUDA version.
        sys.modules["torch"] = None  # type: ignore[assignment] # makes the import fail


def orphaned(start: Start) -> bool:
    """Return whether the parent is gone."""
    return os.getppid() != start.parent


def confine(start: Start) -> bool:
    """Confine this process before the agent and its threads exist; return whether that worked.

    Afterwards it can open only libraries and devices, and can't trace or signal outside processes.
    Needs Landlock (kernel 5.13).

    Shared memory between processes of one user needs files. An attacker with access to it does not
    need this process, so nothing is confined there.
    """
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return not start.needs_files and _landlock()


def no_more_processes() -> None:
    """Forbid new processes and threads, once the agent has its threads."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def listeners() -> list[int]:
    """Return the descriptors of this process's listening sockets."""
    return [descriptor for descriptor in range(256) if listens(descriptor)]


def listens(descriptor: int) -> bool:
    """Return whether a socket still listens. UCX closes its socket when an attacker has used up all
    descriptors, and never opens another."""
    try:
        end = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        end.detach()


def wait(channel: int, seconds: float) -> bool:
    """Wait for a message; return whether there is one."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def _landlock() -> bool:
    version = _libc.syscall(
        _LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION
    )
    if version < 1:
        return False
    access = _ALL_FILE_ACCESS[min(version, max(_ALL_FILE_ACCESS))]
    attributes = struct.pack("<QQQ", access, 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    if rules < 0:
        return False
    try:
        for path in _libraries():
            _allow(rules, path, _READ_AND_RUN)
        for path in _DEVICES:
            _allow(rules, path, _READ_AND_WRITE)
        return bool(_libc.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def _libraries() -> set[str]:
    # Not all of Python's search path: the starting directory may contain keys.
    paths = {sys.prefix, sys.base_prefix, *_LIBRARIES, *(f"/proc/{x}" for x in _OF_THE_SYSTEM)}
    for package in _PACKAGES:
        if (found := importlib.util.find_spec(package)) is not None and found.origin is not None:
            paths.add(str(Path(found.origin).parent.parent))
    for name in ("LD_LIBRARY_PATH", "NIXL_PLUGIN_DIR"):
        paths.update(os.environ.get(name, "").split(":"))
    return paths - {"", "/"}


def _allow(rules: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # the directory does not exist here
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= ~_LIST
        rule = struct.pack("<Qi", access, descriptor)
        _libc.syscall(_LANDLOCK_ADD_RULE, rules, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
