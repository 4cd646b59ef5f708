"""The file of ``--config`` by itself, and beside flags and variables."""

from argparse import ArgumentParser
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from common.cli.command_line import FRONTEND, ConfigSettings, read_command_line
from common.cli.flag_settings import ConfigFile, FlagSettings, unknown
from common.errors import ConfigurationError


class Odd(FlagSettings):
    flag_group: ClassVar[str] = "odd"
    flag_prefix: ClassVar[str] = "odd-"

    count: int = Field(1, ge=1, description="a number")
    pause_s: float = Field(2.0, description="how long")
    quiet: bool = Field(False, description="a switch")
    one: str | None = Field(None, description="a way")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "odd.yaml"


def odd(file: Path, text: str, *argv: str, **environ: str) -> Odd:
    file.write_text(text)
    line = read_command_line(
        ArgumentParser(), (ConfigSettings, Odd), FRONTEND, [f"--config={file}", *argv]
    )
    assert not line.rest
    return Odd.from_args(line.ours, environ)


def test_a_flag_beats_the_environment_and_that_the_file_and_that_the_default(file: Path) -> None:
    text = "odd-count: 5\nodd_pause: 7\n"
    assert odd(file, text) == Odd(count=5, pause_s=7.0)
    assert odd(file, text, MMROUTER_ODD_COUNT="6") == Odd(count=6, pause_s=7.0)
    assert odd(file, text, "--odd-count=8", MMROUTER_ODD_COUNT="6") == Odd(count=8, pause_s=7.0)
    assert odd(file, "odd-quiet: true", "--no-odd-quiet") == Odd()
    assert odd(file, "odd-quiet: yes") == Odd(quiet=True)
    assert odd(file, "odd-one: 2026-01-01") == Odd(one="2026-01-01")


@pytest.mark.parametrize("text", ["", "# nothing\n", "odd-count:\n", "odd-count: null\n", "{}"])
def test_nothing_behind_a_key_is_unset(file: Path, text: str) -> None:
    assert odd(file, text) == Odd()


def test_the_file_has_a_variable_of_its_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("odd-count: 5")
    monkeypatch.setenv("MMROUTER_CONFIG", str(file))
    line = read_command_line(ArgumentParser(), (ConfigSettings, Odd), FRONTEND, [])
    assert Odd.from_args(line.ours) == Odd(count=5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("odd-count: many", "odd-count='many'"),
        ("odd-count: 0", "odd-count=0"),
        ("odd-count: true", "odd-count=true"),
        ("odd-one: false", "odd-one=false"),
        ("odd-one: off", "odd-one=false"),
        ("odd-one: {a: 1}", "odd-one={'a': 1}"),
        ("odd-count: [1]", r"odd-count=\[1\]"),
        ("odd-count: {a: 1}", "odd-count={'a': 1}"),
        ("odd-quiet: 5", "odd-quiet=5"),
        ("odd-quiet: maybe", "odd-quiet='maybe'"),
        ("odd-one: 5", "odd-one=5"),
        ("odd-pause: .nan\nodd-count: -1", "odd-count=-1"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_file_and_key(file: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"odd\.yaml: {named}.* is unusable: .") as caught:
        odd(file, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- a\n- b", "must have a key for each flag"),
        ("a word", "must have a key for each flag"),
        ("odd-count: [", "is no YAML"),
        ("on: 1", "the key True is no text"),
        ("5: 1", "the key 5 is no text"),
        ("odd-count: 1\nodd_count: 2", "odd-count stands there twice"),
        ("odd-count: 1\nodd-count: 1", "odd-count stands there twice"),
        ("config: other.yaml", "config can't stand in a file"),
        ("odd-one: !!python/object/apply:os.getcwd []", "is no YAML"),
        ("a: b\x00", "is no YAML"),
    ],
)
def test_what_is_no_list_of_flags_is_refused(file: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        odd(file, text)
    assert "odd.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    for name in ("missing", ".", "binary"):
        with pytest.raises(ConfigurationError, match="can't be read"):
            ConfigFile.read(tmp_path / name)


def test_dashes_and_underscores_are_the_same_but_behind_a_dot(file: Path) -> None:
    file.write_text("a_b: 1\nc_d.e_f: 2")
    assert ConfigFile.read(file).values == {"a-b": 1, "c-d.e_f": 2}


def test_the_nearest_is_told() -> None:
    known = ["--router-mode", "--router-stall"]
    assert unknown("--router-mod", known) == "--router-mod is unknown; did you mean --router-mode?"
    assert unknown("--elephants", known) == "--elephants is unknown"
