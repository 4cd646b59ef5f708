"""Who can race in the serving benchmark, and in which order."""

from pathlib import Path

import pytest

from tests.benchmarks.serving.contenders import TABLE, Family, Foreign, named


def test_names_are_those_of_the_table_once_each() -> None:
    assert [each.name for each in named(["round-robin", "kv", "kv"])] == ["round-robin", "kv"]
    with pytest.raises(ValueError, match="no contender is called fast: there are kv, "):
        named(["fast"])
    assert len({each.name for each in TABLE}) == len(TABLE)


def test_who_needs_another_program_says_so(tmp_path: Path) -> None:
    foreign = Foreign("ROUTER", ("some-router",))
    assert foreign.missing({}) == "ROUTER does not name its program"
    program = tmp_path / "some-router"
    assert foreign.missing({"ROUTER": str(program)}) == f"ROUTER={program} is no program"
    program.touch(mode=0o755)
    assert foreign.missing({"ROUTER": str(program)}) is None
    assert all(each.foreign for each in TABLE if each.family in (Family.DYNAMO, Family.VLLM_ROUTER))


def test_another_checkout_races_under_its_name(tmp_path: Path) -> None:
    checkout = tmp_path / "older"
    with pytest.raises(ValueError, match="older is no checkout of this project"):
        named([], [checkout])
    (checkout / "frontend").mkdir(parents=True)
    (checkout / "frontend" / "__main__.py").touch()
    (other,) = named([], [checkout])
    assert other.name == "older"
    assert other.env["PYTHONPATH"] == str(checkout)
    with pytest.raises(ValueError, match="a contender is called older already"):
        named([], [checkout, checkout])
