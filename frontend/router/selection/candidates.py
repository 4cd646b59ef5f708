"""The targets a request could go to, with their loads and costs, position by position.

Lists side by side rather than a list of objects: a decision touches every target of the
fleet, and this way it mostly does so without a loop in Python.
"""

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from common.identity import Target, WorkerId
from frontend.router.selection.estimate import Estimate
from frontend.router.selection.load import TargetLoad
from frontend.router.selection.selector import Work

_SORTED = 256
"""Candidates up to which sorting them all is faster than finding the least."""


class Candidates(NamedTuple):
    """Candidates, in a stable order.

    Attributes:
        targets: each once.
        slots: requests each can run at once, 0 if unknown.
        loads: load of each.
        load_costs: what each load costs, in tokens.
        paces: how many times the fleet's time a token takes each.
        positions: position of each target.
    """

    targets: Sequence[Target]
    slots: Sequence[int]
    loads: Sequence[TargetLoad]
    load_costs: Sequence[float]
    paces: Sequence[float]
    positions: dict[Target, int]

    def without(self, excluded: Collection[WorkerId]) -> "Candidates":
        """Those whose workers are not excluded."""
        return self.only(lambda target: target.worker_id not in excluded)

    def only(self, wanted: Callable[[Target], bool]) -> "Candidates":
        """Those that a condition holds for."""
        return self._at([i for i, target in enumerate(self.targets) if wanted(target)])

    def _at(self, kept: list[int]) -> "Candidates":
        targets = [self.targets[i] for i in kept]
        return Candidates(
            targets,
            [self.slots[i] for i in kept],
            [self.loads[i] for i in kept],
            [self.load_costs[i] for i in kept],
            [self.paces[i] for i in kept],
            {target: position for position, target in enumerate(targets)},
        )

    def costs(self, estimate: Estimate, price: Callable[[Work], float]) -> list[float]:
        """Return the cost of a request on each.

        Args:
            estimate: its work on each target.
            price: the cost of work at pace 1.
        """
        nowhere, load_costs, paces = price(estimate.nowhere), self.load_costs, self.paces
        costs = [
            pace * (nowhere + load_cost) for pace, load_cost in zip(paces, load_costs, strict=True)
        ]
        # Targets with equal overlaps share one object, so that few prices are computed.
        prices: dict[int, float] = {}
        for target, work in estimate.elsewhere.items():
            position = self.positions.get(target)
            if position is not None:
                key = id(work)
                cost = prices.get(key)
                if cost is None:
                    cost = prices[key] = price(work)
                costs[position] = paces[position] * (cost + load_costs[position])
        return costs


def cheapest(costs: Sequence[float], limit: int, chosen: int) -> list[int]:
    """Positions of the least costs in ascending order, ``chosen`` always among them."""
    positions = range(len(costs))
    if len(costs) <= _SORTED:
        order = sorted(positions, key=costs.__getitem__)[:limit]
    else:
        order = heapq.nsmallest(limit, positions, key=costs.__getitem__)
    if chosen not in order:
        order[-1] = chosen
    return order
