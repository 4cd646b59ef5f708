"""Choosing a target: the cost of each candidate, and a policy that decides (``modes.py``).

The cost of a target is what the fleet would have to compute if the request went
there: in milliseconds that are learned (``pricing.py``), or in tokens::

    cost =  prefill_weight * prompt tokens the target has to prefill
          + encode_weight  * media tokens it has to encode
          + ship_weight    * MiB of media tensors it lacks
          + load_weight    * prompt tokens that already wait for prefill there
          + decode_weight  * tokens in the contexts of requests decoding there
          + queue_weight   * requests in its queue
          + step_weight    if it has any request: half a step until the one that runs has ended

The first three depend on the request, the rest is the target's load. Nothing here
knows how overlaps or loads came to be known.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from common.identity import Target
from frontend.router.modes import Busyness, Choice, Situation
from frontend.router.selection.load import TargetLoad
from frontend.router.settings import RouterSettings

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


class Costs(msgspec.Struct, frozen=True, gc=False):
    """The parts of a cost, each after its weight or rate, in tokens or milliseconds. Their sum is
    the cost.

    Attributes:
        prefill, encode, ship: of the request.
        load, decode, queue: of the target's load.
        step: until the step that runs has ended, if there is a weight for that; in milliseconds
            also the next step, which every request takes part in.
    """

    prefill: float
    encode: float
    ship: float
    load: float
    decode: float
    queue: float
    step: float = 0.0


class Weights(NamedTuple):
    """What a unit of each part costs; see the settings."""

    prefill: float = 1.0
    encode: float = 1.0
    ship: float = 1.0
    load: float = 1.0
    decode: float = 1.0
    queue: float = 1.0
    step: float = 1.0

    def costs(self, work: Work, load: TargetLoad) -> Costs:
        """The parts of the cost of a request's work at a target with a load."""
        return Costs(
            self.prefill * work.prefill_tokens,
            self.encode * work.media_tokens,
            self.ship * work.ship_bytes / _MIB,
            self.load * load.prefill_tokens,
            self.decode * load.decode_tokens,
            self.queue * load.waiting,
            self.step if load.active else 0.0,
        )


class Selector:
    """Chooses among candidates. Keeps only how many times it did, and a generator.

    Args:
        settings: mode, weights and temperature.

    Attributes:
        weights: those of the settings.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.weights = Weights(
            settings.prefill_weight,
            settings.encode_weight,
            settings.ship_weight,
            settings.load_weight,
            settings.decode_weight,
            settings.queue_weight,
            settings.step_weight,
        )
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
            + (settings.step_weight if load.active else 0.0)
        )

    def choose(
        self,
        targets: Sequence[Target],
        costs: Sequence[float],
        loads: Sequence[TargetLoad],
        slots: Sequence[int],
        prompt_cost: float,
    ) -> Choice:
        """Choose a target.

        Args:
            targets: candidates, at least one, in a stable order.
            costs: of each candidate, both parts added.
            loads: of each candidate.
            slots: requests each candidate can run at once, 0 if unknown.
            prompt_cost: more than 0, the unit of the temperature.
        """
        if len(targets) == 1:
            return Choice(0, "only-worker")
        settings = self._settings

        def busyness(position: int) -> Busyness:
            load = loads[position]
            return load.active, self.load_cost(load)

        choice = settings.mode.policy(
            Situation(
                costs=costs,
                busyness=busyness,
                is_idle=lambda position: not loads[position].active,
                would_wait=lambda position: _queues(loads[position], slots[position]),
                prompt_cost=prompt_cost,
                temperature=settings.temperature,
                spread=settings.spread,
                turn=self._turn,
                random=self._random,
            )
        )
        self._turn += 1
        return choice if choice.reason else Choice(choice.position, settings.mode.value)


def _queues(load: TargetLoad, slots: int) -> bool:
    """Whether a request sent there now would wait for others to end."""
    return load.waiting > 0 or 0 < slots <= load.active
