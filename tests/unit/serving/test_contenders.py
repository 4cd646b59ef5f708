"""Who can race in the serving benchmark, and in which order."""

from pathlib import Path

import pytest

from tests.benchmarks.serving.contenders import CACHE_AWARE, TABLE, named


def test_names_are_those_of_the_table_once_each() -> None:
    assert [each.name for each in named(["round-robin", "kv", "kv"])] == ["round-robin", "kv"]
    with pytest.raises(ValueError, match="no contender is called fast: there are kv, "):
        named(["fast"])
    assert len({each.name for each in TABLE}) == len(TABLE)


def test_who_needs_another_program_says_so(tmp_path: Path) -> None:
    (router,) = named([CACHE_AWARE])
    assert router.missing({}) == "VLLM_ROUTER does not name its program"
    program = tmp_path / "vllm-router"
    assert router.missing({"VLLM_ROUTER": str(program)}) == f"VLLM_ROUTER={program} is no program"
    program.touch(mode=0o755)
    assert router.missing({"VLLM_ROUTER": str(program)}) is None
    (ours,) = named(["kv"])
    assert ours.missing({}) is None
