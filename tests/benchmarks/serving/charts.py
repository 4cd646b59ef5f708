"""Draws what a CSV of races shows: ``python -m tests.benchmarks.serving.charts CSV DIRECTORY
[PREFIX ...]``.

Three charts, each left out if the CSV has nothing for it: the first token against the rate of an
open loop, throughput against how often each picture is asked about, CPU time per streamed token.
Blocks that don't count are left out. Needs matplotlib (the extra ``bench``).
"""

import argparse
import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

Row: TypeAlias = Mapping[str, str]
Points: TypeAlias = Mapping[float, tuple[float, float, float]]
"""Of a line: median, least and most by place."""

_OPEN: Final = re.compile(r"(?P<kind>[a-z0-9-]+)@(?P<rate>[\d.]+)/s")
_REUSE: Final = re.compile(r"pictures-(?P<times>\d+)@(?P<clients>\d+)")
_STREAMS: Final = re.compile(r"streams@\d+")
_CPU: Final = re.compile(r"(?P<role>[a-z_]+)_us_per_token")


@dataclass(frozen=True)
class Lines:
    """A chart of lines, one for each contender."""

    title: str
    across: str
    up: str
    lines: Mapping[str, Points]


@dataclass(frozen=True)
class Bars:
    """A chart of stacked bars, one for each contender, of medians by role."""

    title: str
    up: str
    bars: Mapping[str, Mapping[str, float]]


def read_rows(file: Iterable[str]) -> list[Row]:
    """Those that count."""
    return [row for row in csv.DictReader(file) if row["valid"] == "1"]


def charts(rows: Sequence[Row]) -> dict[str, Lines | Bars]:
    """All charts that there is something for, by the names of their files."""
    made: dict[str, Lines | Bars] = {}
    kinds = dict.fromkeys(match["kind"] for row in rows if (match := _OPEN.fullmatch(row["load"])))
    for kind in kinds:
        lines = _lines(rows, re.compile(rf"{kind}@([\d.]+)/s"), "first_token_ms_p50")
        made[f"first-token-{kind}"] = Lines(
            f"First token, {kind}", "requests a second", "ms, p50 of a block", lines
        )
    clients = dict.fromkeys(
        match["clients"] for row in rows if (match := _REUSE.fullmatch(row["load"]))
    )
    for number in clients:
        lines = _lines(rows, re.compile(rf"pictures-(\d+)@{number}"), "requests_per_s")
        title = f"Throughput of {number} clients"
        across = "times that each picture is asked about"
        made[f"throughput-{number}"] = Lines(title, across, "requests a second", lines)
    streams = [row for row in rows if _STREAMS.fullmatch(row["load"])]
    for load in dict.fromkeys(row["load"] for row in streams):
        bars = _bars([row for row in streams if row["load"] == load])
        name = load.replace("@", "-")
        made[f"cpu-{name}"] = Bars(f"CPU time of a token, {load}", "microseconds", bars)
    return made


def _lines(rows: Sequence[Row], load: re.Pattern[str], column: str) -> dict[str, Points]:
    values: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if (match := load.fullmatch(row["load"])) and row[column]:
            values[row["contender"]][float(match[1])].append(float(row[column]))
    return {
        contender: {
            place: (statistics.median(some), min(some), max(some))
            for place, some in sorted(places.items())
        }
        for contender, places in values.items()
    }


def _bars(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for column, value in row.items():
            if value and (match := _CPU.fullmatch(column)):
                values[row["contender"]][match["role"]].append(float(value))
    return {
        contender: {role: statistics.median(some) for role, some in roles.items()}
        for contender, roles in values.items()
    }


def draw(chart: Lines | Bars, file: Path) -> None:
    """As a PNG."""
    import matplotlib as mpl  # not installed where nobody draws

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    match chart:
        case Lines(lines=lines):
            for name, points in lines.items():
                medians = [median for median, _, _ in points.values()]
                below = [median - least for median, least, _ in points.values()]
                above = [most - median for median, _, most in points.values()]
                axes.errorbar(
                    list(points), medians, yerr=[below, above], marker="o", capsize=3, label=name
                )
            axes.set_xlabel(chart.across)
            axes.set_ylim(bottom=0)
        case Bars(bars=bars):
            roles = dict.fromkeys(role for each in bars.values() for role in each)
            bottom = [0.0] * len(bars)
            for role in roles:
                heights = [each.get(role, 0.0) for each in bars.values()]
                axes.bar(list(bars), heights, bottom=bottom, label=role.replace("_", " "))
                bottom = [one + other for one, other in zip(bottom, heights, strict=True)]
            if len(bars) > 4:
                plt.setp(axes.get_xticklabels(), rotation=25, ha="right", rotation_mode="anchor")
    axes.set_title(chart.title)
    axes.set_ylabel(chart.up)
    axes.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.serving.charts",
        description="Draw what a CSV of races shows.",
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("prefix", nargs="*", help="only charts whose names begin so")
    options = parser.parse_args()
    with options.csv.open(newline="") as file:
        made = charts(read_rows(file))
    prefixes = tuple(options.prefix) or ("",)
    made = {name: chart for name, chart in made.items() if name.startswith(prefixes)}
    if not made:
        parser.error(f"{options.csv} has no block that counts of a load that is drawn")
    options.directory.mkdir(parents=True, exist_ok=True)
    for name, chart in made.items():
        path = options.directory / f"{name}.png"
        draw(chart, path)
        print(path)


if __name__ == "__main__":
    main()
