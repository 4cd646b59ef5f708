"""The tiny models that examples serve, for tests."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import run_python

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


def shared_demo_model(factory: pytest.TempPathFactory, family: str = "qwen2-vl") -> Path:
    """Return a family's model, made once for all processes of a run: no test may change it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    models = base / "models"
    models.mkdir(exist_ok=True)
    with (models / f"{family}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        made = run_python(str(_SCRIPT), f"--family={family}", str(models / family), timeout_s=400)
        assert made.returncode == 0, made.stdout
    return models / family
