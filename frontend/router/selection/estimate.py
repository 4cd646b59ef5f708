"""Estimate what a request costs on each target: overlaps of its prompt and media it would need.
Joins index, predictions, windows and media placement.
"""

from collections.abc import Iterable, Mapping, Sequence

from common.identity import BlockHash, Target, WorkerId
from frontend.router.hashing import HashScheme
from frontend.router.index import BlockIndexes
from frontend.router.inputs import MediaNeed, RoutableWorker, RoutingRequest
from frontend.router.selection.costs import Estimate, Work
from frontend.router.selection.media_placement import EncodedMedia, MediaPlacement


class Estimator:
    """Estimates requests. Only reads what it is given."""

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
        """Estimate a request, of which the blocks are known under each scheme, on all targets."""
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
        """Return the items that a target would have to encode where they are not in its prefix
        cache.
        """
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
        """Yield what a hit of at most ``most`` blocks comes to on those targets whose cache has
        groups that differ in it.
        """
        targets = self._with_groups(scheme)
        depths = self._known.match(chain, self._predicted.index) if targets else {}
        for target in targets:
            worker = self._workers[target.worker_id]
            windows = self._windows.groups(target)
            every = self._slots.mask(target).bit_count() if self._known.holdings(target) else 0
            # With one group alone vLLM looks at no block beyond the longest hit.
            looked_at = chain if windows + every > 1 else chain[:most]
            # Where windowed groups are all it has, no full prefix is needed.
            depth = max(0, depths.get(target, 0) - worker.drops_last_block) if every else most
            if windows:
                indexes = [self._predicted.windows]
                if self._known.matches(target):
                    indexes.append(self._windows)
                peek = worker.window_peek(alone=not every)
                depth = self._windows.trim(target, looked_at, min(depth, most), peek, indexes)
            yield target, min(depth, most)

    def _with_groups(self, scheme: HashScheme) -> list[Target]:
        """Return targets with groups in which a hit needs its last blocks only; and where the last
        block is dropped, those with several groups of any kind.
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
    """Return how many of the leading blocks it holds a worker makes use of."""
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
    """Return what is left to do with ``overlap`` blocks cached.

    Args:
        lacking: media that have to be sent.
        raw: media that are not encoded; those that lack unless given.
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
