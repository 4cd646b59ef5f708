"""Router modes: the base class, the built-in ones, and those of installed packages.

A mode chooses from a :class:`Situation`. A package adds one by an entry point of the group
``mmrouter.router_modes``: its name is the value of ``--router-mode``, its class a subclass of
:class:`RouterMode`. See ``examples/extension``.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from common.extensions import ROUTER_MODES, load
from common.identity import Target
from frontend.router.inputs import RoutingRequest
from frontend.router.selection import TargetLoad


class Situation(NamedTuple):
    """Input of a mode: at least two candidates, each a worker and rank, in a stable order.

    Attributes:
        costs: of the request at each, in tokens of prefill, load included.
        slots: requests that each runs at once, 0 if unknown.
    """

    request: RoutingRequest
    targets: Sequence[Target]
    costs: Sequence[float]
    loads: Sequence[TargetLoad]
    slots: Sequence[int]
    random: random.Random

    def least(self, costs: Sequence[float]) -> int:
        """Return the position of the least cost. Random tie-breaks keep
        frontends from piling up.
        """
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least)
        return self.random.choice([one for one, cost in enumerate(costs) if cost == least])

    def would_wait(self, position: int) -> bool:
        """Return whether a request sent there now would be queued."""
        load = self.loads[position]
        return load.waiting > 0 or 0 < self.slots[position] <= load.active


class Choice(NamedTuple):
    """Position of the chosen candidate, and a constant word why; empty
    stands for the mode's name.
    """

    position: int
    reason: str = ""


class RouterMode(ABC):
    """Strategy that chooses a worker for each request. A router has one instance.

    It is called on the event loop for each request, so it may take microseconds. An exception ends
    the request with 500.
    """

    @abstractmethod
    def choose(self, situation: Situation) -> Choice:
        """Choose one of the candidates. Not called for a single one."""


class LeastCost(RouterMode):
    """Least cost; if a request would wait there, the least cost among idle targets."""

    def choose(self, situation: Situation) -> Choice:
        costs = situation.costs
        chosen = situation.least(costs)
        if situation.would_wait(chosen):
            idle = [one for one, load in enumerate(situation.loads) if not load.active]
            if idle:
                return Choice(idle[situation.least([costs[one] for one in idle])], "spread")
        return Choice(chosen, "cost")


class InTurn(RouterMode):
    def __init__(self) -> None:
        self._turn = -1

    def choose(self, situation: Situation) -> Choice:
        self._turn += 1
        return Choice(self._turn % len(situation.targets))


class BuiltInMode(StrEnum):
    """Table of built-in modes: name, line of help, class."""

    description: str
    policy: type[RouterMode]

    def __new__(cls, name: str, description: str, policy: type[RouterMode]) -> "BuiltInMode":
        mode = str.__new__(cls, name)
        mode._value_ = name
        mode.description = description
        mode.policy = policy
        return mode

    KV = "kv", "where the request costs least: blocks and media held, and load", LeastCost
    ROUND_ROBIN = "round-robin", "each worker in turn", InTurn


def mode_named(name: str) -> type[RouterMode]:
    """Return the class of a mode. Raises ConfigurationError if a package's can't be imported."""
    for mode in BuiltInMode:
        if mode == name:
            return mode.policy
    return load(ROUTER_MODES, name, RouterMode)  # type: ignore[type-abstract]
