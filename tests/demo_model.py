"""The tiny models that examples serve, for tests."""

import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parents[1] / "examples" / "demo_model.py"


def make_demo_model(directory: Path, *flags: str, timeout_s: float = 120) -> Path:
    """Write a model's files, in a process of its own.

    Args:
        directory: for the files; made if it isn't there.
        flags: of the script.

    Returns:
        The directory.
    """
    command = [sys.executable, str(_SCRIPT), *flags, str(directory)]
    subprocess.run(command, check=True, timeout=timeout_s)
    return directory
