"""What all engines of a race have done, and whether the machine kept up with them.

A race counts only if it does: engines that come late measure the host and not the contenders.
"""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import msgspec

from tests.simgpu.stats import Stats

LATE_SHARE = 0.05
"""Of their modelled work: engines that came later than that did not keep to the model of time."""


class LateEnginesError(Exception):
    """Engines came too late for a race to mean anything."""


def read_totals(folder: Path) -> Stats:
    """The sum over all engines that write to a folder, as they last wrote it."""
    files = sorted(folder.glob("*.json"))
    return added(msgspec.json.decode(file.read_bytes(), type=Stats) for file in files)


def added(each: Iterable[Stats]) -> Stats:
    """The sum of several."""
    total = Stats()
    for stats in each:
        for field in fields(Stats):
            setattr(total, field.name, getattr(total, field.name) + getattr(stats, field.name))
    return total


def since(before: Stats, now: Stats) -> Stats:
    """What was done between two readings."""
    return Stats(
        **{
            field.name: getattr(now, field.name) - getattr(before, field.name)
            for field in fields(now)
        }
    )


def late_share(stats: Stats) -> float:
    """Seconds that engines came too late, as a share of their modelled work."""
    return stats.late_seconds / stats.busy_seconds if stats.busy_seconds else 0.0


def refuse_late(stats: Stats) -> None:
    """Raises LateEnginesError if engines came later than :data:`LATE_SHARE` allows."""
    if (share := late_share(stats)) > LATE_SHARE:
        raise LateEnginesError(
            f"engines came late by {share:.1%} of their work, more than {LATE_SHARE:.0%}: "
            "the machine was too busy, so nothing was measured"
        )
