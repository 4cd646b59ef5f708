"""The cost of a request on each candidate, in tokens of the fleet's median worker.

It is what the fleet would have to compute if the request went there::

    cost = pace * (           prompt tokens the target has to prefill
                   + ENCODE * media tokens it has to encode
                   + SHIP   * MiB of media tensors it lacks
                   + LOAD   * prompt tokens that already wait for prefill there
                   + DECODE * tokens in the contexts of requests decoding there
                   + QUEUE  * requests in its queue
                   + STEP   if it has any request: half a step until the one that runs has ended )

The pace is learned (``step_times.py``), the other factors are constants. The first three terms
depend on the request, the others are the target's load. ``modes.py`` chooses.
"""

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from common.identity import Target, WorkerId
from frontend.router.selection.load import TargetLoad

_MIB = 1 << 20
_SORTED = 256
"""Candidates up to which sorting them all is faster than finding the least."""


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


class Estimate(NamedTuple):
    """What a request costs on a target that has nothing of it, and on each that has something."""

    nowhere: Work
    elsewhere: dict[Target, Work]

    def on(self, target: Target) -> Work:
        return self.elsewhere.get(target, self.nowhere)

    def advantage(self, target: Target) -> str:
        """Return what speaks for a target, in a word: its blocks, its media, or its load alone."""
        work = self.on(target)
        if work.overlap_blocks:
            return "kv-overlap"
        return "media" if work[2:] != self.nowhere[2:] else "load"


class Costs(msgspec.Struct, frozen=True, gc=False):
    """The parts of a cost, in tokens, each multiplied by the pace: of the request, of the
    target's load, and until the step that runs has ended. Their sum is the cost.
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
    return Costs(
        pace * work.prefill_tokens,
        pace * ENCODE * work.media_tokens,
        pace * SHIP * work.ship_bytes / _MIB,
        pace * LOAD * load.prefill_tokens,
        pace * DECODE * load.decode_tokens,
        pace * QUEUE * load.waiting,
        pace * STEP if load.active else 0.0,
    )


class Candidates(NamedTuple):
    """Candidates, in a stable order, with the slots, loads and paces of each; slots are 0 if
    unknown.
    """

    targets: Sequence[Target]
    slots: Sequence[int]
    loads: Sequence[TargetLoad]
    load_costs: Sequence[float]
    paces: list[float]
    positions: dict[Target, int]

    def without(self, excluded: Collection[WorkerId]) -> "Candidates":
        return self.only(lambda target: target.worker_id not in excluded)

    def only(self, wanted: Callable[[Target], bool]) -> "Candidates":
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
        """Return the cost of a request on each; ``price`` gives that of work at pace 1."""
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
    """Return the positions of the least costs in ascending order, ``chosen`` always among them."""
    positions = range(len(costs))
    if len(costs) <= _SORTED:
        order = sorted(positions, key=costs.__getitem__)[:limit]
    else:
        order = heapq.nsmallest(limit, positions, key=costs.__getitem__)
    if chosen not in order:
        order[-1] = chosen
    return order
