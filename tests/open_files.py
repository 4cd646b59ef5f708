"""What processes have open."""

from contextlib import suppress
from pathlib import Path


def open_files(pid: int | None = None) -> dict[str, Path]:
    """Targets of file descriptors by their numbers: paths, or names such as ``socket:[12]``.

    Args:
        pid: whose; this process's if None.
    """
    found = {}
    for descriptor in Path(f"/proc/{pid or 'self'}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, as that of this listing is
            found[descriptor.name] = descriptor.readlink()
    return found
