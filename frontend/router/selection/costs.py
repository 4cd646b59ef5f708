"""Cost of a request on each candidate, in tokens of the fleet's median worker.

It is what the fleet would have to compute if the request went there::

    cost = pace * (           prompt tokens the target has to prefill
                   + ENCODE * media tokens it has to encode
                   + SHIP   * MiB of media tensors it lacks
                   + LOAD   * prompt tokens that already wait for prefill there
                   + DECODE * tokens in the contexts of requests decoding there
                   + QUEUE  * requests in its queue
                   + STEP   if it has any request: half a step until the one that runs has ended )

The pace is learned (``step_times.py``), the other factors are constants. The first three terms
depend on the request, the rest on the target's load. Overlaps come from index, predictions and
windows, media from their placement. ``modes.py`` chooses.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from common.identity import BlockHash, Target, WorkerId
from frontend.router.hashing import HashScheme
from frontend.router.index import BlockIndexes
from frontend.router.inputs import MediaNeed, RoutableWorker, RoutingRequest
from frontend.router.selection.load import TargetLoad
from frontend.router.selection.media_placement import EncodedMedia, MediaPlacement

_MIB = 1 << 20
_SORTED = 256
"""Candidates up to which sorting them all is faster than finding the least."""


class Work(NamedTuple):
    """Work of a request on one target, load aside: tokens to compute and encode, bytes to send."""

    overlap_blocks: int
    prefill_tokens: int
    media_tokens: int
    ship_bytes: int


class Estimate(NamedTuple):
    """Work of a request on a target that holds none of it, and on each that holds some."""

    nowhere: Work
    elsewhere: dict[Target, Work]

    def on(self, target: Target) -> Work:
        return self.elsewhere.get(target, self.nowhere)

    def advantage(self, target: Target) -> str:
        """Return the advantage of a target in a word: its blocks, its media, or its load alone."""
        work = self.on(target)
        if work.overlap_blocks:
            return "kv-overlap"
        return "media" if work[2:] != self.nowhere[2:] else "load"


class Costs(NamedTuple):
    """Parts of a cost, in tokens, each multiplied by the pace. Their sum is the cost."""

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
"""Cost of a token that waits for prefill there. A prefill under way is half done on average. Also,
a value below 1 makes a prompt join its twin and reuse its blocks rather than compute them a second
time."""

DECODE: Final = 0.05
"""Cost of a token in the context of a decoding request: attention over it is memory traffic in each
step, little beside computing it."""

QUEUE: Final = 512.0
"""Cost of a queued request of unknown length: a short prompt."""

STEP: Final = 100.0
"""Cost of a running step, which must end before a prompt begins: half a step of that model takes as
long as prefilling so many tokens."""


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
    """Candidates in a stable order, with slots (0 if unknown), loads and paces."""

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
        """Return the cost of a request on each; ``price`` gives the cost of work at pace 1."""
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


class Estimator:
    """Estimator of requests; a reader of the state that it is given."""

    def __init__(self, indexes: BlockIndexes, media: MediaPlacement, encoded: EncodedMedia) -> None:
        self._known = indexes.known
        self._predicted = indexes.predicted
        self._windows = indexes.windows
        self._slots = indexes.slots
        self._media = media
        self._encoded = encoded
        self._workers: Mapping[WorkerId, RoutableWorker] = {}
        self._typical: RoutableWorker | None = None
        self._drops = False

    def set_fleet(self, workers: Mapping[WorkerId, RoutableWorker]) -> None:
        self._workers = workers
        kinds = {
            (one.block_size, one.prefix_caching, one.drops_last_block): one
            for one in workers.values()
        }
        # Where all workers are of one kind, equal overlaps are equal work.
        self._typical = next(iter(kinds.values())) if len(kinds) == 1 else None
        self._drops = any(one.drops_last_block for one in workers.values())

    def estimate(
        self, request: RoutingRequest, hashes: Mapping[HashScheme, list[BlockHash]], now: float
    ) -> Estimate:
        """Estimate a request on all targets, from its block hashes under each scheme."""
        nowhere = _work(request, 0, 0, request.media)
        elsewhere: dict[Target, Work] = {}
        if request.reads_cache:
            for scheme, chain in hashes.items():
                # An engine always computes the last prompt token, for its logits, and computes
                # whole blocks: a prompt held to its last token hits one block less. Source:
                # ``KVCacheManager.get_computed_blocks`` of vLLM 0.32.0 and 0.33.0.
                most = max(0, len(request.token_ids) - 1) // scheme.block_size
                held = self._known.match_groups(chain[:most], self._predicted.index)
                for blocks, targets in held:
                    self._add_overlap(elsewhere, request, blocks, targets)
                for target, blocks in self._in_all_groups(scheme, chain, most):
                    elsewhere[target] = _work(request, blocks, scheme.block_size, request.media)
        holders = [self._media.holders(need.mm_hash, now) for need in request.media]
        for worker_id in set().union(*holders):
            worker = self._workers.get(worker_id)
            if worker is None:
                continue
            lacking = [
                need
                for need, holding in zip(request.media, holders, strict=True)
                if worker_id not in holding
            ]
            for target in worker.targets:
                overlap = elsewhere.get(target, nowhere).overlap_blocks
                raw = self._raw(target, request.media, lacking)
                elsewhere[target] = _work(request, overlap, worker.block_size, lacking, raw)
        return Estimate(nowhere, elsewhere)

    def _raw(
        self, target: Target, media: Sequence[MediaNeed], lacking: Sequence[MediaNeed]
    ) -> Sequence[MediaNeed]:
        """Return the items that a target would have to encode where its prefix cache lacks them."""
        if not self._encoded.knows(target):
            return lacking
        return [need for need in media if not self._encoded.holds(target, need.mm_hash)]

    def _add_overlap(
        self,
        elsewhere: dict[Target, Work],
        request: RoutingRequest,
        blocks: int,
        targets: Sequence[Target],
    ) -> None:
        if self._typical is not None:
            usable = _usable(self._typical, blocks)
            work = _work(request, usable, self._typical.block_size, request.media)
            elsewhere.update(dict.fromkeys(targets, work))
            return
        for target in targets:
            worker = self._workers.get(target.worker_id)
            if worker is not None:
                usable = _usable(worker, blocks)
                elsewhere[target] = _work(request, usable, worker.block_size, request.media)

    def _in_all_groups(
        self, scheme: HashScheme, chain: list[BlockHash], most: int
    ) -> Iterable[tuple[Target, int]]:
        """Yield the hit of at most ``most`` blocks on each target whose groups differ in it."""
        targets = self._with_groups(scheme)
        depths = self._known.match(chain, self._predicted.index) if targets else {}
        for target in targets:
            worker = self._workers[target.worker_id]
            windows = self._windows.groups(target)
            every = self._slots.mask(target).bit_count() if self._known.holdings(target) else 0
            # With one group alone vLLM looks at no block beyond the longest hit.
            looked_at = chain if windows + every > 1 else chain[:most]
            # With windowed groups only, no full prefix is needed.
            depth = max(0, depths.get(target, 0) - worker.drops_last_block) if every else most
            if windows:
                indexes = [self._predicted.windows]
                if self._known.matches(target):
                    indexes.append(self._windows)
                peek = worker.window_peek(alone=not every)
                depth = self._windows.trim(target, looked_at, min(depth, most), peek, indexes)
            yield target, min(depth, most)

    def _with_groups(self, scheme: HashScheme) -> list[Target]:
        """Return targets with windowed groups. Where the last block is dropped, add those with
        several groups of any kind.
        """
        targets = dict.fromkeys(self._windows.targets())
        if self._drops:
            targets |= dict.fromkeys(self._slots.owners(self._slots.grouped & self._slots.live))
        return [
            target
            for target in targets
            if (worker := self._workers.get(target.worker_id)) is not None
            and worker.prefix_caching
            and worker.scheme == scheme
        ]


def _usable(worker: RoutableWorker, blocks: int) -> int:
    """Return how many of the leading blocks that it holds a worker uses."""
    if not worker.prefix_caching:
        return 0
    return max(0, blocks - 1) if worker.drops_last_block else blocks


def _work(
    request: RoutingRequest,
    overlap: int,
    block_size: int,
    lacking: Sequence[MediaNeed],
    raw: Sequence[MediaNeed] | None = None,
) -> Work:
    """Return the remaining work: ``lacking`` media are sent, ``raw`` (by
    default the same) encoded.
    """
    cached = overlap * block_size
    raw = lacking if raw is None else raw
    return Work(
        overlap,
        len(request.token_ids) - cached,
        # An item wholly inside the cached prefix is not encoded again.
        sum(need.num_tokens for need in raw if need.span.end > cached),
        sum(need.nbytes for need in lacking),
    )
