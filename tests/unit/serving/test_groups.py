"""Contenders that race in several groups."""

import sys
from pathlib import Path

import pytest

from tests.benchmarks.serving.__main__ import able
from tests.benchmarks.serving.contenders import named
from tests.benchmarks.serving.options import arguments


def groups_of(monkeypatch: pytest.MonkeyPatch, *line: str) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["serving", *line])
    return [[each.name for each in group] for group in arguments().groups]


def test_the_first_contender_is_in_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["--contenders", "kv", "round-robin", "--then", "dynamo", "--then", "vllm-router", "kv"]
    assert groups_of(monkeypatch, *line) == [
        ["kv", "round-robin"],
        ["kv", "dynamo"],
        ["kv", "vllm-router"],
    ]


def test_other_checkouts_race_in_the_first_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "frontend").mkdir()
    (tmp_path / "frontend" / "__main__.py").touch()
    line = ["--contenders", "kv", "--beside", str(tmp_path), "--then", "nixl"]
    assert groups_of(monkeypatch, *line) == [["kv", tmp_path.name], ["kv", "nixl"]]


def test_engines_of_data_parallel_have_one_speed_in_whatever_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        groups_of(monkeypatch, "--contenders", "kv", "--then", "data-parallel", "--slower", "0.5")
    assert "data-parallel" in capsys.readouterr().err


def test_who_is_not_installed_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("BENCH_VLLM_ROUTER", "BENCH_DYNAMO_PYTHON"):
        monkeypatch.delenv(variable, raising=False)
    groups = [named(["kv", "vllm-router"]), named(["kv", "dynamo"]), named(["kv", "nixl"])]
    left, missing = able(groups)
    assert [[each.name for each in group] for group in left] == [["kv"], ["kv", "nixl"]]
    assert set(missing) == {"vllm-router", "dynamo"}
    assert "dynamo is skipped: BENCH_DYNAMO_PYTHON" in capsys.readouterr().err


def test_nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_DYNAMO_PYTHON", raising=False)
    assert able([named(["dynamo"])])[0] == []
