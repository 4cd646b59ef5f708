"""Choosing a target: the cost of each candidate, and what to do with the costs.

The cost of a target is what the fleet would have to compute if the request went
there, in tokens::

    cost =  prefill_weight * prompt tokens the target has to prefill
          + encode_weight  * media tokens it has to encode
          + ship_weight    * MiB of media tensors it lacks
          + load_weight    * prompt tokens that already wait for prefill there
          + decode_weight  * tokens in the contexts of requests decoding there
          + queue_weight   * requests in its queue

The first three depend on the request, the rest is the target's load. Nothing here
knows how overlaps or loads came to be known.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from common.identity import Target
from frontend.router.load import TargetLoad
from frontend.router.settings import RouterMode, RouterSettings

_MIB = 1 << 20


class Work(NamedTuple):
    """What a request costs on one target, load aside.

    Attributes:
        overlap_blocks: leading blocks of the prompt that the target holds.
        prefill_tokens: prompt tokens it has to compute.
        media_tokens: media tokens it has to encode.
        ship_bytes: media tensors it has to be sent.
    """

    overlap_blocks: int
    prefill_tokens: int
    media_tokens: int
    ship_bytes: int


class Choice(NamedTuple):
    """The outcome of a selection.

    Attributes:
        position: index of the chosen candidate.
        reason: why, one of a handful of constant words.
    """

    position: int
    reason: str


class Selector:
    """Chooses among candidates. Keeps only the turn of round-robin and a generator.

    Args:
        settings: mode, weights and temperature.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._turn = 0

    def work_cost(self, work: Work) -> float:
        """The part of the cost that depends on the request."""
        settings = self._settings
        return (
            settings.prefill_weight * work.prefill_tokens
            + settings.encode_weight * work.media_tokens
            + settings.ship_weight * work.ship_bytes / _MIB
        )

    def load_cost(self, load: TargetLoad) -> float:
        """The part of the cost that depends on the target."""
        settings = self._settings
        return (
            settings.load_weight * load.prefill_tokens
            + settings.decode_weight * load.decode_tokens
            + settings.queue_weight * load.waiting
        )

    def choose(
        self,
        targets: Sequence[Target],
        costs: Sequence[float],
        loads: Sequence[TargetLoad],
        slots: Sequence[int],
        prompt_tokens: int,
    ) -> Choice:
        """Choose a target.

        Args:
            targets: candidates, at least one, in a stable order.
            costs: of each candidate, both parts added.
            loads: of each candidate.
            slots: requests each candidate can run at once, 0 if unknown.
            prompt_tokens: length of the prompt, the unit of the temperature.
        """
        if len(targets) == 1:
            return Choice(0, "only-worker")
        mode = self._settings.mode
        if mode is RouterMode.ROUND_ROBIN:
            self._turn += 1
            return Choice((self._turn - 1) % len(targets), mode.value)
        if mode is RouterMode.RANDOM:
            return Choice(self._random.randrange(len(targets)), mode.value)
        if mode is RouterMode.POWER_OF_TWO:
            pair = self._random.sample(range(len(targets)), 2)
            least = self._least([self._busyness(loads[position]) for position in pair])
            return Choice(pair[least], mode.value)
        if mode is RouterMode.LEAST_LOADED:
            return Choice(self._least([self._busyness(load) for load in loads]), mode.value)
        return self._choose_by_cost(costs, loads, slots, prompt_tokens)

    def _choose_by_cost(
        self,
        costs: Sequence[float],
        loads: Sequence[TargetLoad],
        slots: Sequence[int],
        prompt_tokens: int,
    ) -> Choice:
        if self._settings.temperature > 0.0:
            chosen, reason = self._sample(costs, prompt_tokens), "sampled"
        else:
            chosen, reason = self._least(costs), "cost"
        if self._settings.spread and _queues(loads[chosen], slots[chosen]):
            idle = [position for position, load in enumerate(loads) if not load.active]
            if idle:
                return Choice(idle[self._least([costs[one] for one in idle])], "spread")
        return Choice(chosen, reason)

    def _busyness(self, load: TargetLoad) -> tuple[float, float]:
        """Load alone, requests first: it must order targets before any token is known."""
        return load.active, self.load_cost(load)

    def _least(self, keys: Sequence[float] | Sequence[tuple[float, float]]) -> int:
        """The position of the least key; one of them at random if several are least.

        At random, because several frontends that break ties alike would pile up.
        """
        least = min(keys)
        if keys.count(least) == 1:
            return keys.index(least)
        return self._random.choice([one for one, key in enumerate(keys) if key == least])

    def _sample(self, costs: Sequence[float], prompt_tokens: int) -> int:
        """Softmax over negated costs, in units of the prompt's length."""
        unit = self._settings.temperature * max(prompt_tokens, 1)
        least = min(costs)
        weights = [math.exp((least - cost) / unit) for cost in costs]
        return self._random.choices(range(len(costs)), weights)[0]


def _queues(load: TargetLoad, slots: int) -> bool:
    """Whether a request sent there now would wait for others to end."""
    return load.waiting > 0 or 0 < slots <= load.active
