"""Every module of the product has tests, and the page says which."""

import re

from setup import tests_map
from setup.tests_map import ROOT, THROUGH, holders, page


def test_each_module_has_a_test() -> None:
    untested = [module for module, tests in holders().items() if not tests]
    assert untested == [], "import it in a test, or name one in THROUGH of setup/tests_map.py"


def test_exceptions_exist() -> None:
    for module, test in THROUGH.items():
        path = test if test.startswith("tests/") else f"tests/unit/{test}"
        assert (ROOT / module).is_file() and (ROOT / path).is_file(), module


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/tests.md").read_text() == page(), "run `make docs`"


def test_no_test_module_imports_another() -> None:
    """What several of them share is in a module that bears no test."""
    names = {test.stem for test in tests_map.tests()}
    importing = re.compile(r"^from tests[\w.]*\.(test_\w+) import", re.M)
    for file in (ROOT / "tests").rglob("*.py"):
        assert not names & set(importing.findall(file.read_text())), file
