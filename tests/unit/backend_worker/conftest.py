"""What tests of a worker share."""

from pathlib import Path

import pytest

from tests.demo_model import shared_demo_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's files."""
    return shared_demo_model(tmp_path_factory)
