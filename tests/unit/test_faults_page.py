"""The list of known failures names tests that exist."""

import re
from pathlib import Path

import pytest

UNIT = Path(__file__).parent
ROOT = UNIT.parents[1]
PAGE = ROOT / "tests" / "known-failures.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("- ")]


def test_there_is_a_list() -> None:
    assert len(ROWS) >= 15


@pytest.mark.parametrize("row", ROWS)
def test_every_failure_has_tests_that_exist(row: str) -> None:
    named = re.findall(r"`([^`]+)::([^`]+)`", row)
    assert named, "name a test: `frontend/test_x.py::test_y`, from tests/unit/ or tests/"
    for path, name in named:
        found = ROOT / path if path.startswith("tests/") else UNIT / path
        assert re.search(rf"^ *(async )?def {name}\(", found.read_text(), re.M), (path, name)
