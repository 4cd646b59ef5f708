"""Flame graphs are drawn of the stacks that a profiler wrote."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.benchmarks.flames import NoProfilerError, draw, read_stacks, record, without_trunk

STACKS = """<module> (run.py);run (asyncio/base.py);send (frontend/http/reply.py) 60
<module> (run.py);run (asyncio/base.py);send (frontend/http/reply.py);dumps (json <b>.py) 20
<module> (run.py);run (asyncio/base.py);step (vllm/engine.py) 20
<module> (run.py);run (asyncio/base.py);rare (vllm/engine.py) 0
"""


def test_widths_are_shares_of_samples() -> None:
    root = without_trunk(read_stacks(STACKS))
    assert root.name == "run (asyncio/base.py)"
    assert root.samples == 100
    picture = draw(root, "frontend & worker")
    titles = re.findall(r"<title>(.*?)</title>", picture)
    assert titles == [
        "run (asyncio/base.py): 100.0%",
        "send (frontend/http/reply.py): 80.0%",
        "dumps (json &lt;b&gt;.py): 20.0%",
        "step (vllm/engine.py): 20.0%",
    ]
    widths = [float(each) for each in re.findall(r'<rect x=.* width="([\d.]+)"', picture)]
    assert widths == [1199.5, 959.5, 239.5, 239.5]
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_a_line_that_is_no_stack_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        read_stacks("frame without samples")


def test_without_a_profiler_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoProfilerError, match="pip install py-spy"):
        record({"frontend": 1}, 1, tmp_path)


def test_a_profiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('Permission denied')\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoProfilerError, match="of frontend: Permission denied"):
        record({"frontend": 1}, 1, tmp_path / "graphs")
