"""The router's modes, one table of policies, and the choice of a target by one of them.

A mode is one entry: its name, one line for operators, and the policy. Flags, their help and the
tests read the table. A policy may look at a :class:`Situation`, and need not know how costs and
loads came to be known.
"""

import random
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from common.identity import Target
from frontend.router.selection import TargetLoad


class Situation(NamedTuple):
    """What a policy chooses from: at least two candidates, in a stable order.

    Attributes:
        costs: what the request would cost at each candidate, load included.
        is_idle: whether the candidate at a position has no request at all.
        would_wait: whether a request sent to the candidate at a position would wait for others.
        turn: how many times this router has chosen before.
        random: the router's generator.
    """

    costs: Sequence[float]
    is_idle: Callable[[int], bool]
    would_wait: Callable[[int], bool]
    turn: int
    random: random.Random

    def least(self, costs: Sequence[float]) -> int:
        """Return the position of the least cost; of several one at random, because several
        frontends that break ties alike would pile up.
        """
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least)
        return self.random.choice([one for one, cost in enumerate(costs) if cost == least])


class Choice(NamedTuple):
    """The position of the chosen candidate, and why: a constant word, or empty if the mode alone
    says it.
    """

    position: int
    reason: str = ""


Policy: TypeAlias = Callable[[Situation], Choice]


def _by_cost(situation: Situation) -> Choice:
    costs = situation.costs
    chosen = situation.least(costs)
    if situation.would_wait(chosen):
        idle = [one for one in range(len(costs)) if situation.is_idle(one)]
        if idle:
            return Choice(idle[situation.least([costs[one] for one in idle])], "spread")
    return Choice(chosen, "cost")


def _in_turn(situation: Situation) -> Choice:
    return Choice(situation.turn % len(situation.costs))


class RouterMode(StrEnum):
    """The table: how a worker is chosen, with one line for operators and the policy that does."""

    description: str
    policy: Policy

    def __new__(cls, name: str, description: str, policy: Policy) -> "RouterMode":
        mode = str.__new__(cls, name)
        mode._value_ = name
        mode.description = description
        mode.policy = policy
        return mode

    KV = "kv", "where the request costs least: blocks and media held, and load", _by_cost
    ROUND_ROBIN = "round-robin", "each worker in turn", _in_turn


class Selector:
    """Chooses among candidates. Keeps only how many times it did, and a generator."""

    def __init__(self, mode: RouterMode, seed: int | None = None) -> None:
        self._mode = mode
        self._random = random.Random(seed)
        self._turn = 0

    def choose(
        self,
        targets: Sequence[Target],
        costs: Sequence[float],
        loads: Sequence[TargetLoad],
        slots: Sequence[int],
    ) -> Choice:
        """Choose one of at least one target, in a stable order, by the costs, loads and slots,
        0 if unknown, of each.
        """
        if len(targets) == 1:
            return Choice(0, "only-worker")
        choice = self._mode.policy(
            Situation(
                costs=costs,
                is_idle=lambda position: not loads[position].active,
                would_wait=lambda position: _queues(loads[position], slots[position]),
                turn=self._turn,
                random=self._random,
            )
        )
        self._turn += 1
        return choice if choice.reason else Choice(choice.position, self._mode.value)


def _queues(load: TargetLoad, slots: int) -> bool:
    """Return whether a request sent there now would wait for others to end."""
    return load.waiting > 0 or 0 < slots <= load.active
