"""The router's modes: one table of policies.

A mode is one entry: its name, one line for operators, and the policy. Flags, their help and the
tests read the table. What a policy may look at is a :class:`Situation`; how costs and loads came
to be known is not its business.
"""

import math
import random
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

Busyness: TypeAlias = tuple[float, float]
"""How busy a candidate is: its requests, then the cost of its load. Compared as tuples are, since
requests must order candidates before any token is known."""


class Situation(NamedTuple):
    """What a policy chooses from: at least two candidates, in a stable order.

    Attributes:
        costs: what the request would cost at each candidate, load included.
        busyness: of the candidate at a position, whatever its caches hold.
        is_idle: whether the candidate at a position has no request at all.
        would_wait: whether a request sent to the candidate at a position would wait for others.
        prompt_tokens: at least 1, the unit of the temperature.
        temperature: of the softmax over costs; 0 for none.
        turn: how many times this router has chosen before.
        random: the router's generator.
    """

    costs: Sequence[float]
    busyness: Callable[[int], Busyness]
    is_idle: Callable[[int], bool]
    would_wait: Callable[[int], bool]
    prompt_tokens: int
    temperature: float
    turn: int
    random: random.Random

    def least(self, keys: Sequence[float] | Sequence[Busyness]) -> int:
        """The position of the least key; one of them at random if several are least.

        At random, because several frontends that break ties alike would pile up.
        """
        least = min(keys)
        if keys.count(least) == 1:
            return keys.index(least)
        return self.random.choice([one for one, key in enumerate(keys) if key == least])


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
    if situation.temperature > 0.0:
        chosen, reason = _sample(situation), "sampled"
    else:
        chosen, reason = situation.least(costs), "cost"
    if situation.would_wait(chosen):
        idle = [one for one in range(len(costs)) if situation.is_idle(one)]
        if idle:
            return Choice(idle[situation.least([costs[one] for one in idle])], "spread")
    return Choice(chosen, reason)


def _sample(situation: Situation) -> int:
    """Softmax over negated costs, in units of the prompt's length."""
    unit = situation.temperature * situation.prompt_tokens
    least = min(situation.costs)
    weights = [math.exp((least - cost) / unit) for cost in situation.costs]
    return situation.random.choices(range(len(weights)), weights)[0]


def _in_turn(situation: Situation) -> Choice:
    return Choice(situation.turn % len(situation.costs))


def _at_random(situation: Situation) -> Choice:
    return Choice(situation.random.randrange(len(situation.costs)))


def _less_busy_of_two(situation: Situation) -> Choice:
    pair = situation.random.sample(range(len(situation.costs)), 2)
    return Choice(pair[situation.least([situation.busyness(one) for one in pair])])


def _least_busy(situation: Situation) -> Choice:
    return Choice(situation.least([situation.busyness(one) for one in range(len(situation.costs))]))


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
    RANDOM = "random", "any worker, each as likely", _at_random
    POWER_OF_TWO = "power-of-two", "the less busy of two taken at random", _less_busy_of_two
    LEAST_LOADED = "least-loaded", "the least busy, whatever its caches hold", _least_busy
