"""Choosing a target: the cost of each candidate, and a policy that decides (``modes.py``).

The cost of a target is what the fleet would have to compute if the request went there, in tokens
of its median worker::

    cost = pace * (           prompt tokens the target has to prefill
                   + ENCODE * media tokens it has to encode
                   + SHIP   * MiB of media tensors it lacks
                   + LOAD   * prompt tokens that already wait for prefill there
                   + DECODE * tokens in the contexts of requests decoding there
                   + QUEUE  * requests in its queue
                   + STEP   if it has any request: half a step until the one that runs has ended )

The pace is learned (``step_times.py``), the other factors are constants. The first three terms
depend on the request, the others are the target's load. Nothing here knows how overlaps or loads
came to be known.
"""

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from common.identity import Target
from frontend.router.modes import Choice, RouterMode, Situation
from frontend.router.selection.load import TargetLoad

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
    """The parts of a cost, in tokens, each multiplied by the pace. Their sum is the cost.

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


ENCODE: Final = 1.0
"""Cost of a media token: an encoder takes about as long for one as prefill does."""

SHIP: Final = 8.0
"""Cost of a MiB of media tensors: 0.3 ms by shared memory, as prefilling eight tokens takes a model
of seven billion parameters on an H100."""

LOAD: Final = 0.5
"""Cost of a token that waits for prefill there. A prefill under way is half done on average. Also:
below 1, so that a prompt joins its twin, whose blocks it will find, rather than compute them a
second time."""

DECODE: Final = 0.05
"""Cost of a token in the context of a request that decodes: attention over it is memory traffic in
each step, little beside computing it."""

QUEUE: Final = 512.0
"""Cost of a request in the queue, whose length nobody knows: a short prompt."""

STEP: Final = 100.0
"""Cost of a running step, which has to end before a prompt is begun: half a step of that model
takes as long as prefilling so many tokens."""


def cost_of_work(work: Work) -> float:
    """Return the part of the cost that depends on the request, at pace 1."""
    return work.prefill_tokens + ENCODE * work.media_tokens + SHIP * work.ship_bytes / _MIB


def cost_of_load(load: TargetLoad) -> float:
    """Return the part of the cost that depends on the target, at pace 1."""
    return (
        LOAD * load.prefill_tokens
        + DECODE * load.decode_tokens
        + QUEUE * load.waiting
        + (STEP if load.active else 0.0)
    )


def parts_of_cost(work: Work, load: TargetLoad, pace: float) -> Costs:
    """Return the parts of the cost of a request's work at a target with a load."""
    return Costs(
        pace * work.prefill_tokens,
        pace * ENCODE * work.media_tokens,
        pace * SHIP * work.ship_bytes / _MIB,
        pace * LOAD * load.prefill_tokens,
        pace * DECODE * load.decode_tokens,
        pace * QUEUE * load.waiting,
        pace * STEP if load.active else 0.0,
    )


class Selector:
    """Chooses among candidates. Keeps only how many times it did, and a generator.

    Args:
        mode: decides.
        seed: of random choices, to have them again.
    """

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
        """Choose a target.

        Args:
            targets: candidates, at least one, in a stable order.
            costs: of each candidate, both parts added.
            loads: of each candidate.
            slots: requests each candidate can run at once, 0 if unknown.
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
    """Whether a request sent there now would wait for others to end."""
    return load.waiting > 0 or 0 < slots <= load.active
