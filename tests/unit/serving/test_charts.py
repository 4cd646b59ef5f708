"""What is drawn of a CSV of the serving benchmark. Drawing itself needs matplotlib."""

import importlib.util
from pathlib import Path

import pytest

from tests.benchmarks.serving.charts import Bars, Lines, charts, draw, read_rows

CSV = """load,contender,valid,first_token_ms_p50,requests_per_s,frontend_us_per_token
pictures-1@16,kv,1,80,10,
pictures-4@16,kv,1,40,20,
pictures-4@16,kv,1,40,22,
pictures-4@16,kv,1,40,27,
pictures-4@16,kv,0,40,99,
pictures-4@16,round-robin,1,90,11,
text@2/s,kv,1,30,2,
text@4.5/s,kv,1,50,4,
streams@8,kv,1,9,9,60
streams@8,kv,1,9,9,64
chats@4,kv,1,9,9,
"""


def test_each_chart_has_what_counts() -> None:
    made = charts(read_rows(CSV.splitlines()))
    assert set(made) == {"first-token-text", "throughput-16", "cpu-streams-8"}
    reuse, rates, cpu = (
        made[name] for name in ("throughput-16", "first-token-text", "cpu-streams-8")
    )
    assert isinstance(reuse, Lines)
    assert reuse.lines["kv"] == {1.0: (10, 10, 10), 4.0: (22, 20, 27)}
    assert reuse.lines["round-robin"] == {4.0: (11, 11, 11)}
    assert isinstance(rates, Lines)
    assert rates.lines == {"kv": {2.0: (30, 30, 30), 4.5: (50, 50, 50)}}
    assert isinstance(cpu, Bars)
    assert cpu.bars == {"kv": {"frontend": 62}}


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="matplotlib is not installed (the extra `bench`)",
)
def test_charts_become_files(tmp_path: Path) -> None:
    for name, chart in charts(read_rows(CSV.splitlines())).items():
        draw(chart, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
