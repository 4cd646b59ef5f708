"""The calculator says what the page on scale shows, and follows its inputs."""

from dataclasses import replace

import pytest

from examples.scale import (
    BLOCK_BYTES,
    CONSTANTS,
    DECISIONS_US,
    HUGE,
    LARGE,
    PAGE,
    SMALL,
    Estimate,
    constants,
    decision_us,
    main,
    table,
)
from tests.deployment import ROOT


@pytest.mark.parametrize("made", [constants(), *map(table, PAGE.values())])
def test_the_page_has_what_the_calculator_says(made: str) -> None:
    """`python -m examples.scale --page` prints it."""
    assert f"\n\n{made}\n" in (ROOT / "docs" / "scale.md").read_text()


def test_constants_are_those_of_the_pages_that_measured_them() -> None:
    routing = (ROOT / "docs" / "routing.md").read_text()
    assert f"| bytes per indexed block | {BLOCK_BYTES.value:.0f} |" in routing
    assert "| block events applied per second, one core | 1,104,000 |" in routing
    for workers, microseconds in DECISIONS_US:
        (row,) = (line for line in routing.splitlines() if line.startswith(f"| {workers:,} | kv"))
        assert row.endswith(f"| {microseconds} |")
        assert decision_us(workers) == microseconds
    assert {each.kind for each in CONSTANTS} == {"measured", "computed", "assumed"}


def test_a_picture_has_the_bytes_that_were_measured() -> None:
    assert LARGE.patches == 5476
    assert LARGE.picture_mb == pytest.approx(6.44, abs=0.01)
    assert replace(LARGE, image=None).prompt_tokens == LARGE.text_tokens


def test_more_work_needs_more_frontends() -> None:
    few, many = Estimate.of(SMALL).frontends, Estimate.of(LARGE).frontends
    assert few is not None and many is not None and few < many
    for change in (
        replace(LARGE, rps=LARGE.rps / 2),
        replace(LARGE, output_tokens=100),
        replace(LARGE, tokens_per_message=4),
        replace(LARGE, image=None),
        replace(LARGE, cached=0.9),
        replace(LARGE, busy=0.8),
    ):
        fewer = Estimate.of(change).frontends
        assert fewer is not None and fewer < many


def test_frontends_do_their_work_within_what_they_may_be_busy_for() -> None:
    estimate = Estimate.of(LARGE)
    assert estimate.frontends is not None
    cores = estimate.tokens_cores + estimate.requests_cores + estimate.inline_cores
    assert cores / estimate.frontends + estimate.events_core <= LARGE.busy
    assert cores / (estimate.frontends - 1) + estimate.events_core > LARGE.busy


def test_events_that_fill_a_core_leave_no_number_of_frontends() -> None:
    assert Estimate.of(HUGE).events_core > 1
    assert Estimate.of(HUGE).frontends is None
    assert "none is enough" in table([HUGE])


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--workers", "200", "--rps", "2000", "--image", "1024x1024", "--output-tokens", "300"])
    said = capsys.readouterr().out
    for _, value in Estimate.of(LARGE).rows():
        assert value.strip("*") in said


@pytest.mark.parametrize(
    "argv",
    [
        ["--image", "1024"],
        ["--image", "0x10"],
        ["--workers", "0"],
        ["--rps", "-1"],
        ["--rps", "inf"],
        ["--rps", "nan"],
        ["--new", "1.5"],
        ["--output-tokens", "many"],
    ],
)
def test_what_makes_no_sense_is_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert argv[0] in capsys.readouterr().err
