"""Names of the shared memory in which engines keep encodings, to remove what killed ones left.

Imports nothing of vLLM.
"""

import contextlib
import re
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")

_NAME: Final = re.compile(r"vllm_ec_mmrouter-(\d+)-(\d+)_dp\d+\.mmap")
"""As vLLM makes it of an instance's name and a rank."""


def instance_name(worker: int) -> str:
    """What the engine of a worker is called.

    Args:
        worker: its process id.
    """
    return f"mmrouter-{_pid_namespace()}-{worker}"


def remove_memory(worker: int) -> None:
    """Remove what is left of the engine of a worker. Once all its processes are gone."""
    for file in SHARED_MEMORY.glob(f"vllm_ec_{instance_name(worker)}_dp*.mmap"):
        _remove(file)


def reap_memory() -> None:
    """Remove what is left of engines whose workers are gone, and those who would clean up."""
    for file in SHARED_MEMORY.glob("vllm_ec_mmrouter-*.mmap"):
        found = _NAME.fullmatch(file.name)
        # In a container with the same shared memory a process id means another process.
        if found and int(found[1]) == _pid_namespace() and not Path(f"/proc/{found[2]}").exists():
            _remove(file)


def _remove(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):  # it is another user's
        file.unlink()


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
