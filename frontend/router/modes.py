"""The router's modes: one table of policies.

A mode is one entry: its name, one line for operators, and the policy. Flags, their help and the
tests read the table. What a policy may look at is a :class:`Situation`; how costs and loads came
to be known is not its business.
"""

import random
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias


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
        """Return the position of the least cost; one of them at random if several are least.

        At random, because several frontends that break ties alike would pile up.
        """
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least)
        return self.random.choice([one for one, cost in enumerate(costs) if cost == least])


class Choice(NamedTuple):
    """The outcome of a selection.

    Attributes:
        position: index of the chosen candidate.
        reason: why, one of a handful of constant words; empty if the mode alone says it.
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
    """How a worker is chosen: the table.

    Attributes:
        description: one line for operators.
        policy: chooses.
    """

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
