"""Which parts of a run on a GPU there are, and that one that fails ends no other."""

import sys
from pathlib import Path

import pytest

from tests.gpu import __main__ as program
from tests.gpu.parts import CPU, CUDA, PARTS, STOPPING_S, Part
from tests.gpu.results import Reads

GPU = Path(__file__).parents[2] / "gpu"


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory, with no model."""
    monkeypatch.setattr(program, "make_demo_model", lambda directory: directory)
    return tmp_path


def parts_are(monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Parts that run a line of Python each."""
    parts = tuple(Part(name, name, Reads, 5, 60) for name in scripts)
    monkeypatch.setattr(program, "PARTS", {CPU: parts})
    monkeypatch.setattr(
        program, "_command", lambda part, *_: [sys.executable, "-c", scripts[part.name]]
    )


GIVES = 'print(\'noise\'); print(\'{"gb_s": {"host": 1.5}, "failed": {}}\')'


@pytest.mark.parametrize("device", PARTS)
def test_each_part_has_a_program_and_time_to_stop(device: str) -> None:
    for part in PARTS[device]:
        assert (GPU / f"{part.module}.py").is_file()
        assert part.least_s <= part.most_s
        assert not part.starts_engines or part.least_s > STOPPING_S


def test_a_run_on_a_gpu_has_time_for_all_but_the_last_part() -> None:
    assert sum(part.least_s for part in PARTS[CUDA][:-1]) <= 420
    assert sum(part.least_s for part in PARTS[CPU]) <= 420


def test_a_part_that_fails_leaves_the_others_their_turn(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotes = "raise AssertionError('plain did not answer:\\n(APIServer) INFO warmed up')"
    broken = "raise ValueError('no CUDA here')"
    parts_are(monkeypatch, broken=broken, quotes=quotes, silent="", nixl=GIVES)
    found = program.run(CPU, ["broken", "quotes", "silent", "nixl"], 60, out)
    assert found.nixl_gb_s == {"host": 1.5}
    assert (
        found.missing["broken"] == "ended with status 1: ValueError: no CUDA here; see broken.log"
    )
    assert found.missing["quotes"] == (
        "ended with status 1: AssertionError: plain did not answer; see quotes.log"
    )
    assert found.missing["silent"].startswith("ended with status 0")


def test_parts_can_be_chosen(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts_are(monkeypatch, other="raise SystemExit(1)", nixl=GIVES)
    found = program.run(CPU, ["nixl"], 60, out)
    assert (found.missing, found.nixl_gb_s) == ({}, {"host": 1.5})


def test_a_part_without_time_does_not_start(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts_are(monkeypatch, nixl=GIVES)
    found = program.run(CPU, ["nixl"], 0, out)
    assert found.missing["nixl"].endswith("s were left, it needs 5")


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--device=cpu", "kernels"])
    assert "--device cpu has no part 'kernels': float32, h2d, nixl" in capsys.readouterr().err
