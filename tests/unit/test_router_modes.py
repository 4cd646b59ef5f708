"""Whoever looks for the router's modes finds all of them, in every place that lists them."""

import argparse
import re
from pathlib import Path

import pytest

from frontend.router.modes import BuiltInMode
from frontend.router.settings import RouterSettings

ROOT = Path(__file__).parents[2]
MODES = {mode.value for mode in BuiltInMode}
_NAMES = r"([a-z][a-z, -]+)"

LISTS = {
    "docs/your-model.md": r"^\| `--router-mode` \|(.*)\|$",
    "Makefile": rf"ROUTER_MODE\W+\({_NAMES}\)",
    **{
        str(script.relative_to(ROOT)): rf"^# +ROUTER_MODE +{_NAMES} \({RouterSettings().mode}\)$"
        for script in (ROOT / "examples" / "launch").glob("*.sh")
        if "ROUTER_MODE" in script.read_text()
    },
}
"""Where modes are listed, and what finds the list there."""

# `ROUTER_MODE=kv`, `ROUTER_MODE ?= kv`, `${ROUTER_MODE:=kv}`, `--router-mode kv`
USES = re.compile(r"(?:ROUTER_MODE\s*[:?]?=\s*|--router-mode[ =]+)([a-z][a-z-]*)")
USERS = [
    ROOT / "Makefile",
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "examples" / "launch").glob("*.sh"),
]


def read(name: str) -> str:
    """A file, its recipe's `echo`s as one text."""
    return (ROOT / name).read_text().replace('"\n\t@echo "', " ")


def names(text: str) -> set[str]:
    """What a list names: words in backquotes if there are any, else those between commas."""
    return set(re.findall(r"`([^`]+)`", text) or re.split(r", | or ", text))


@pytest.mark.parametrize("name", LISTS)
def test_a_list_has_every_mode_and_no_other(name: str) -> None:
    (found,) = re.findall(LISTS[name], read(name), re.MULTILINE)
    assert names(found) == MODES, f"list each mode in {name}"


def test_the_page_on_routing_describes_the_table() -> None:
    section = read("docs/routing.md").partition("\n## Modes\n")[2].partition("\n## ")[0]
    described = {mode.value: mode.description for mode in BuiltInMode}
    found = dict(re.findall(r"^\| `(.+)` \| (.+) \|$", section, re.MULTILINE))
    assert found == described, "give each mode a row under `Modes` of docs/routing.md"


def test_the_help_describes_the_table() -> None:
    parser = argparse.ArgumentParser()
    RouterSettings.add_arguments(parser)
    (choices,) = re.findall(r"--router-mode \{(.*?)\}", parser.format_usage())
    assert set(choices.split(",")) == MODES
    text = " ".join(parser.format_help().split())
    for mode in BuiltInMode:
        assert f"{mode}: {mode.description}" in text


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.name)
def test_nobody_uses_a_mode_that_does_not_exist(path: Path) -> None:
    assert set(USES.findall(path.read_text())) <= MODES
