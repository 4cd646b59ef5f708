"""Choosing a target: the cost of each candidate, and a policy that decides (``modes.py``).

The cost of a target is what the fleet would have to compute if the request went there, in tokens
of its median worker::

    cost = pace * (  prefill * prompt tokens the target has to prefill
                   + encode  * media tokens it has to encode
                   + ship    * MiB of media tensors it lacks
                   + load    * prompt tokens that already wait for prefill there
                   + decode  * tokens in the contexts of requests decoding there
                   + queue   * requests in its queue
                   + step    if it has any request: half a step until the one that runs has ended )

The pace is learned (``step_times.py``), the other factors are constants. The first three terms
depend on the request, the others are the target's load. Nothing here knows how overlaps or loads
came to be known.
"""

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

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
    """The parts of a cost, each after its weight and the pace. Their sum is the cost.

    Attributes:
        prefill, encode, ship: of the request.
        load, decode, queue: of the target's load.
        step: until the step that runs has ended.
    """

    prefill: float
    encode: float
    ship: float
    load: float
    decode: float
    queue: float
    step: float


LOAD_WEIGHT: Final = 0.5
"""Of a token that waits for prefill, as a share of one that the request brings. A prefill under way
is half done on average. Also: below 1, so that a prompt joins its twin, whose blocks it will find,
rather than compute them a second time."""


class Weights(NamedTuple):
    """What a unit of each part costs, in prompt tokens to prefill.

    Attributes:
        prefill: a prompt token; the operator's.
        encode: a media token: an encoder takes about as long for one as prefill does.
        ship: a MiB of media tensors: 0.3 ms by shared memory, as prefilling eight tokens takes a
            model of seven billion parameters on an H100.
        load: a token that waits for prefill there.
        decode: a token in the context of a request that decodes: attention over it is memory
            traffic in each step, little beside computing it.
        queue: a request in the queue, whose length nobody knows: a short prompt.
        step: that a step runs, which has to end before a prompt is begun: half a step of that
            model takes as long as prefilling so many tokens.
    """

    prefill: float = 1.0
    encode: float = 1.0
    ship: float = 8.0
    load: float = LOAD_WEIGHT
    decode: float = 0.05
    queue: float = 512.0
    step: float = 100.0

    def of_work(self, work: Work) -> float:
        """Return the part of the cost that depends on the request, at pace 1."""
        return (
            self.prefill * work.prefill_tokens
            + self.encode * work.media_tokens
            + self.ship * work.ship_bytes / _MIB
        )

    def of_load(self, load: TargetLoad) -> float:
        """Return the part of the cost that depends on the target, at pace 1."""
        return (
            self.load * load.prefill_tokens
            + self.decode * load.decode_tokens
            + self.queue * load.waiting
            + (self.step if load.active else 0.0)
        )

    def costs(self, work: Work, load: TargetLoad, pace: float) -> Costs:
        """Return the parts of the cost of a request's work at a target with a load."""
        return Costs(
            pace * self.prefill * work.prefill_tokens,
            pace * self.encode * work.media_tokens,
            pace * self.ship * work.ship_bytes / _MIB,
            pace * self.load * load.prefill_tokens,
            pace * self.decode * load.decode_tokens,
            pace * self.queue * load.waiting,
            pace * self.step if load.active else 0.0,
        )


class Selector:
    """Chooses among candidates. Keeps only how many times it did, and a generator.

    Args:
        settings: mode and temperature.
        weights: of a load, by which the busier of two targets is told.
        seed: of random choices, to have them again.
    """

    def __init__(self, settings: RouterSettings, weights: Weights, seed: int | None = None) -> None:
        self._settings = settings
        self._weights = weights
        self._random = random.Random(seed)
        self._turn = 0

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
            prompt_tokens: the unit of the temperature.
        """
        if len(targets) == 1:
            return Choice(0, "only-worker")
        settings = self._settings

        def busyness(position: int) -> Busyness:
            load = loads[position]
            return load.active, self._weights.of_load(load)

        choice = settings.mode.policy(
            Situation(
                costs=costs,
                busyness=busyness,
                is_idle=lambda position: not loads[position].active,
                would_wait=lambda position: _queues(loads[position], slots[position]),
                prompt_tokens=max(prompt_tokens, 1),
                temperature=settings.temperature,
                turn=self._turn,
                random=self._random,
            )
        )
        self._turn += 1
        return choice if choice.reason else Choice(choice.position, settings.mode.value)


def _queues(load: TargetLoad, slots: int) -> bool:
    """Whether a request sent there now would wait for others to end."""
    return load.waiting > 0 or 0 < slots <= load.active
