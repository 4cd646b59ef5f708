"""A folder in the current directory is not taken for a package by whoever did not look there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

STARTER = """
import subprocess
from common.aio.processes import python_command
subprocess.run(python_command("probe"), check=True)
"""


@pytest.mark.parametrize(
    ("flags", "found"), [(["-m", "starter"], "here"), (["-P", "-m", "starter"], "elsewhere")]
)
def test_a_module_is_found_as_the_one_that_starts_it(
    tmp_path: Path, flags: list[str], found: str
) -> None:
    for place in ("here", "elsewhere"):
        (tmp_path / place / "probe").mkdir(parents=True)
        (tmp_path / place / "probe" / "__main__.py").write_text(f"print({place!r})")
    (tmp_path / "elsewhere" / "starter.py").write_text(STARTER)
    done = subprocess.run(
        [sys.executable, *flags],
        cwd=tmp_path / "here",
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'elsewhere'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [found]
