"""All declared settings, of both sides: none contradicts another, each is refused by name."""

import argparse
from typing import ClassVar

import pytest
from pydantic import Field

from backend_worker import args as worker
from common.cli.flag_settings import FlagSettings, add_all, unit_of
from common.errors import ConfigurationError
from frontend import args as frontend
from frontend.http import HttpSettings
from frontend.processing import ArenaSettings
from setup.settings_page import page, range_of
from setup.vllm_map import ROOT

GROUPS = tuple(dict.fromkeys((*worker.GROUPS, *frontend.GROUPS)))
FIELDS = [
    pytest.param(group, name, id=group.variable(name))
    for group in GROUPS
    for name in group.declared()
]


@pytest.mark.parametrize("groups", [worker.GROUPS, frontend.GROUPS], ids=["worker", "frontend"])
def test_no_two_settings_have_one_name(groups: tuple[type[FlagSettings], ...]) -> None:
    variables = [group.variable(name) for group in groups for name in group.declared()]
    assert len(set(variables)) == len(variables)
    add_all(argparse.ArgumentParser(), groups)  # argparse refuses a flag that it has already


def test_what_both_sides_share_means_the_same() -> None:
    """A launch script hands one environment to all."""
    sides = [
        {group.variable(name): field.annotation for name, field in group.declared().items()}
        for group in GROUPS
    ]
    meanings: dict[str, object] = {}
    for side in sides:
        for variable, annotation in side.items():
            assert meanings.setdefault(variable, annotation) == annotation


@pytest.mark.parametrize(("group", "name"), FIELDS)
def test_each_is_described_and_a_wrong_value_is_refused_by_where_it_stood(
    group: type[FlagSettings], name: str
) -> None:
    field = group.declared()[name]
    assert field.description
    # Text and paths may be anything at this stage.
    if field.annotation in (bool, int, float) or field.metadata:
        variable = group.variable(name)
        with pytest.raises(ConfigurationError, match=f"^{variable}='\\^' is unusable: .") as caught:
            group.from_args(argparse.Namespace(), {variable: "^"})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("group", "name"), FIELDS)
def test_an_empty_variable_is_unset(group: type[FlagSettings], name: str) -> None:
    empty = {group.variable(name): ""}
    assert group.from_args(argparse.Namespace(), empty) == group.from_args(argparse.Namespace(), {})


@pytest.mark.parametrize(("group", "name"), FIELDS)
def test_numbers_are_finite(group: type[FlagSettings], name: str) -> None:
    if group.declared()[name].annotation is float:
        # The last is finite, but what is made of it is not.
        for value in ("nan", "inf", "-inf", *(["1e308"] if "_mb" in name else [])):
            with pytest.raises(ConfigurationError, match=group.variable(name)):
                group.from_args(argparse.Namespace(), {group.variable(name): value})


def test_ranges_are_exact() -> None:
    assert range_of(ArenaSettings.declared()["arena_gb"]) == ">= 0, <= 1048576"
    assert range_of(HttpSettings.declared()["key_share"]) == "> 0, <= 1"


def test_the_page_is_what_is_declared() -> None:
    assert (ROOT / "docs/settings.md").read_text() == page(), "run `make docs`"


class Odd(FlagSettings):
    flag_group: ClassVar[str] = "odd"
    flag_prefix: ClassVar[str] = "odd-"
    variables: ClassVar[dict[str, str]] = {"quiet": "ODD"}

    share: float = Field(0.25, gt=0.0, le=1.0, description="100% at most")
    pause_s: float = Field(2.0, description="how long")
    quiet: bool = Field(False, description="without a flag")
    one: str | None = Field(None, description="a way")


def odd(*argv: str, **environ: str) -> Odd:
    parser = argparse.ArgumentParser()
    Odd.add_arguments(parser)
    return Odd.from_args(parser.parse_args(argv), environ)


def test_help_has_default_unit_and_variable() -> None:
    parser = argparse.ArgumentParser()
    Odd.add_arguments(parser)
    text = " ".join(parser.format_help().split())
    assert "100% at most (default 0.25; MMROUTER_ODD_SHARE)" in text
    assert "how long (default 2 s; MMROUTER_ODD_PAUSE)" in text
    assert "a way (MMROUTER_ODD_ONE)" in text
    assert "quiet" not in text
    assert unit_of("memory_mb") == "MiB" and not unit_of("mode")


def test_a_variable_without_a_flag() -> None:
    assert odd(ODD="1").quiet
    assert not odd(MMROUTER_ODD_QUIET="1").quiet


def test_a_flag_beats_its_variable() -> None:
    assert odd("--odd-one", "a", MMROUTER_ODD_ONE="c") == Odd(one="a")
