"""What a request costs on each target: overlaps of its prompt and media it would need.

Joins index, predictions, windows and media placement. Load and choice are elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from common.identity import BlockHash, Target, WorkerId
from frontend.router.approximate import Predictions
from frontend.router.hashing import HashScheme
from frontend.router.index import KvIndex
from frontend.router.media_placement import MediaPlacement
from frontend.router.request import RoutingRequest
from frontend.router.selector import Work
from frontend.router.windows import WindowIndex
from frontend.router.worker import RoutableWorker


class Estimate(NamedTuple):
    """What a request costs.

    Attributes:
        nowhere: on a target that has nothing of it.
        elsewhere: on each target that has something of it.
    """

    nowhere: Work
    elsewhere: dict[Target, Work]


class Estimator:
    """Estimates requests.

    Args:
        index, predictions, windows, media: what is known of workers; only read.
    """

    def __init__(
        self,
        index: KvIndex,
        predictions: Predictions,
        windows: WindowIndex,
        media: MediaPlacement,
    ) -> None:
        self._index = index
        self._predictions = predictions
        self._windows = windows
        self._media = media

    def estimate(
        self,
        request: RoutingRequest,
        hashes: Mapping[HashScheme, Sequence[BlockHash]],
        workers: Mapping[WorkerId, RoutableWorker],
        now: float,
    ) -> Estimate:
        """Estimate a request on all targets.

        Args:
            hashes: its blocks under each scheme.
            workers: the fleet.
            now: monotonic seconds.
        """
        prompt_tokens = len(request.token_ids)
        media_tokens = sum(need.num_tokens for need in request.media)
        media_bytes = sum(need.nbytes for need in request.media)
        nowhere = Work(0, prompt_tokens, media_tokens, media_bytes)
        overlaps: dict[Target, int] = {}
        if request.reads_cache:
            for scheme, chain in hashes.items():
                overlaps.update(self._overlaps(scheme, chain, prompt_tokens))
        holders = [self._media.holders(need.mm_hash, now) for need in request.media]
        warm = set(overlaps)
        if any(holders):
            for worker_id in set().union(*holders):
                worker = workers.get(worker_id)
                warm.update(worker.targets if worker is not None else ())
        elsewhere: dict[Target, Work] = {}
        for target in warm:
            worker = workers.get(target.worker_id)
            if worker is None:
                continue
            blocks = overlaps.get(target, 0) if worker.prefix_caching else 0
            if worker.drops_last_block and blocks:
                blocks -= 1
            cached = blocks * worker.block_size
            missing_tokens = missing_bytes = 0
            for need, holding in zip(request.media, holders, strict=True):
                if target.worker_id in holding:
                    continue
                missing_bytes += need.nbytes
                # An item wholly inside the cached prefix is not encoded again.
                if need.span.end > cached:
                    missing_tokens += need.num_tokens
            elsewhere[target] = Work(blocks, prompt_tokens - cached, missing_tokens, missing_bytes)
        return Estimate(nowhere, elsewhere)

    def _overlaps(
        self, scheme: HashScheme, chain: Sequence[BlockHash], prompt_tokens: int
    ) -> dict[Target, int]:
        """For each target that holds some, the leading blocks its engine can reuse.

        An engine always computes the last prompt token, for its logits, and computes
        whole blocks: a prompt held to its last token hits one block less. Source:
        ``KVCacheManager.get_computed_blocks`` of vLLM 0.32.0.
        """
        usable = chain[: max(0, prompt_tokens - 1) // scheme.block_size]
        overlaps = self._index.match(usable, self._predictions.index)
        windowed = self._windows.targets()
        if windowed:
            known = self._index.match(usable)
            for target in windowed:
                depth = known.get(target, 0)
                if not self._index.holdings(target) and self._index.matches(target):
                    # Windowed groups are all it has: no full prefix is needed.
                    depth = len(usable)
                depth = self._windows.trim(target, usable, depth)
                # Predicted blocks beyond what is known are in all groups, or in none.
                if overlaps.get(target, 0) == known.get(target, 0):
                    overlaps[target] = depth
        return overlaps
