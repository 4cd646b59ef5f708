"""The table of known failures names tests that exist."""

import re
from pathlib import Path

import pytest

UNIT = Path(__file__).parent
PAGE = UNIT.parents[1] / "docs" / "faults.md"
TABLE = PAGE.read_text().partition("## Known failures")[2]
ROWS = [
    line for line in TABLE.splitlines() if line.startswith("| ") and "failure | tests" not in line
]


def test_there_is_a_table() -> None:
    assert len(ROWS) >= 15


@pytest.mark.parametrize("row", ROWS)
def test_every_failure_has_tests_that_exist(row: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
    assert named
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (UNIT / path).read_text(), re.M), (path, name)
