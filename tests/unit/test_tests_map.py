"""Every module of the product has tests, and the page says which."""

from setup.tests_map import ROOT, THROUGH, holders, page


def test_each_module_has_a_test() -> None:
    assert [module for module, tests in holders().items() if not tests] == []


def test_exceptions_exist() -> None:
    for module, test in THROUGH.items():
        path = test if test.startswith("tests/") else f"tests/unit/{test}"
        assert (ROOT / module).is_file() and (ROOT / path).is_file(), module


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/tests.md").read_text() == page(), "run `make docs`"
