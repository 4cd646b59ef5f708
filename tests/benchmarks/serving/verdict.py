"""Which rounds count, and what contenders are to each other in them."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.serving.figures import Block, Figures, Setting, figures_of
from tests.simgpu.totals import LATE_SHARE

Round = dict[str, Figures]
"""Figures by contender."""


@dataclass(frozen=True)
class Verdict:
    """What a race showed.

    Attributes:
        rounds: that count.
        refused: why nothing was measured; None if something was.
    """

    load: str
    rounds: Sequence[Round]
    refused: str | None = None

    def column(self, contender: str, name: str) -> list[float]:
        """A figure in each round that counts; none if it was not measured."""
        values = (each.get(contender, {}).get(name) for each in self.rounds)
        return [value for value in values if value is not None]

    def median(self, contender: str, name: str) -> float | None:
        """Over rounds."""
        column = self.column(contender, name)
        return statistics.median(column) if column else None

    def ratio(self, one: str, other: str, name: str) -> float | None:
        """One contender's over another's, of the same round each; the median over rounds."""
        both = (
            (each.get(one, {}).get(name), each.get(other, {}).get(name)) for each in self.rounds
        )
        ratios = [mine / theirs for mine, theirs in both if mine is not None and theirs]
        return statistics.median(ratios) if ratios else None


def judge(load: str, blocks: Sequence[Block], setting: Setting) -> Verdict:
    """Rounds count in which all engines kept to their model of time.

    One that was interrupted, and lacks a contender, does not count either.

    A race is refused if more than half of its rounds don't, since then those that are left were
    chosen by the machine.
    """
    rounds: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        rounds[block.number].append(block)
    names = {block.contender for block in blocks}
    whole = [each for each in rounds.values() if len(each) == len(names)]
    counted = [each for each in whole if all(block.valid for block in each)]
    if not whole:
        return Verdict(load, (), "no round was finished")
    if not counted or 2 * len(counted) < len(whole):
        worst = max((block.late for block in blocks), default=0.0)
        why = (
            f"in {len(whole) - len(counted)} of {len(whole)} rounds engines came late by more "
            f"than {LATE_SHARE:.0%} of their work, {worst:.1%} at most: the machine was too busy"
        )
        return Verdict(load, (), why)
    return Verdict(
        load,
        [{block.contender: figures_of(block, setting) for block in each} for each in counted],
    )
