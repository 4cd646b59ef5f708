"""What tests of a worker share."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's files."""
    directory = tmp_path_factory.mktemp("model")
    script = REPOSITORY / "examples" / "demo_model.py"
    subprocess.run([sys.executable, str(script), str(directory)], check=True, timeout=120)
    return directory
