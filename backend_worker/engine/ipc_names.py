"""Name the engines' shared memory and sockets after their worker; remove those of dead workers.
Imports nothing of vLLM."""

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")

_NAME: Final = re.compile(r"vllm_ec_mmrouter-(\d+)-(\d+)_dp\d+\.mmap")
"""As vLLM makes it of an instance's name and a rank."""

_SOCKETS: Final = "VLLM_RPC_BASE_PATH"
_DIRECTORY: Final = re.compile(r"mmrouter-(\d+)-(\d+)-\w{8}")
_MAX_PATH_LEN: Final = 107 - len("/01234567-89ab-cdef-0123-456789abcdef")
"""Of a directory in which a socket of vLLM's, which is called by a UUID, still has an address."""


def instance_name(worker: int) -> str:
    """Return the instance name of a worker's engine; ``worker`` is a process id."""
    return f"mmrouter-{_pid_namespace()}-{worker}"


def make_socket_directory() -> None:
    """Put the engine's sockets into a directory of this worker: a killed process leaves several
    behind. vLLM's default stays if the user set one, or the path would be too long."""
    if _SOCKETS in os.environ:
        return
    directory = Path(tempfile.mkdtemp(prefix=f"{instance_name(os.getpid())}-"))
    if len(str(directory)) > _MAX_PATH_LEN:
        directory.rmdir()
    else:
        os.environ[_SOCKETS] = str(directory)


def remove_memory(worker: int) -> None:
    """Remove the files of a worker's engine, once all its processes are gone."""
    for file in SHARED_MEMORY.glob(f"vllm_ec_{instance_name(worker)}_dp*.mmap"):
        _remove(file)
    for directory in Path(tempfile.gettempdir()).glob(f"{instance_name(worker)}-*"):
        shutil.rmtree(directory, ignore_errors=True)


def reap_memory() -> None:
    """Remove the files of engines whose workers are gone."""
    for file in SHARED_MEMORY.glob("vllm_ec_mmrouter-*.mmap"):
        if _is_orphan(_NAME.fullmatch(file.name)):
            _remove(file)
    for directory in Path(tempfile.gettempdir()).glob("mmrouter-*"):
        if _is_orphan(_DIRECTORY.fullmatch(directory.name)):
            shutil.rmtree(directory, ignore_errors=True)  # another user's stays


def _is_orphan(name: re.Match[str] | None) -> bool:
    # In a container with the same shared memory the same process id is another process.
    return (
        name is not None
        and int(name[1]) == _pid_namespace()
        and not Path(f"/proc/{name[2]}").exists()
    )


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):  # it is another user's, or no file
        file.unlink()


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
