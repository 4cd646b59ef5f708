"""vLLM's processor cache, as the renderer sees it: the store, and what a request brings."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from vllm.multimodal.cache.base import (
    BaseMultiModalProcessorCache,
    MultiModalProcessorCacheInItem,
    MultiModalProcessorCacheOutItem,
)
from vllm.utils.cache import CacheInfo

from common.identity import MmHash
from frontend.processing.batch import Processed
from frontend.processing.store import ProcessedStore


class _AtHand(threading.local):
    """Items of the request that a thread works for."""

    def __init__(self) -> None:
        self.items: dict[MmHash, Processed] = {}


class StoreCache(BaseMultiModalProcessorCache):
    """Used by the renderer's one processing thread, for one request at a time.

    A thread that was stuck may come back, beside the thread that took its place.
    """

    def __init__(self, store: ProcessedStore) -> None:
        super().__init__()
        self._store = store
        self._at_hand = _AtHand()
        self._hits = self._total = 0
        self._last = CacheInfo(0, 0)

    @contextmanager
    def request(self, at_hand: Iterable[Processed] = ()) -> Iterator[None]:
        """What vLLM asks for within is one request's.

        Nothing that it was told to be cached can be evicted until it has it.

        Args:
            at_hand: items of the request that need no processing.
        """
        self._at_hand.items = {each.mm_hash: each for each in at_hand}
        try:
            yield
        finally:
            self._at_hand.items = {}

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether vLLM need not process it."""
        name = MmHash(mm_hash)
        self._total += 1
        if name not in self._at_hand.items:
            kept = self._store.get(name)
            if kept is None:
                return False
            self._at_hand.items[name] = kept
        self._hits += 1
        return True

    def get_and_update_item(
        self, mm_item: MultiModalProcessorCacheInItem, mm_hash: str
    ) -> MultiModalProcessorCacheOutItem:
        """The item: what is kept, or ``mm_item`` from now on."""
        name = MmHash(mm_hash)
        kept = self._at_hand.items.get(name)
        if kept is None:
            assert mm_item is not None, "vLLM processes what it was told is not cached"
            kept = self._at_hand.items[name] = self._store.put(Processed(name, *mm_item))
        return kept.item, kept.prompt_updates

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Nothing: what is at hand is held."""

    def clear_cache(self) -> None:
        """Answer no more with what was kept until now."""
        self._store.clear()
        self._at_hand.items = {}
        self._hits = self._total = 0
        self._last = CacheInfo(0, 0)

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        """How often vLLM asked, and how often there was something."""
        now = CacheInfo(self._hits, self._total)
        if not delta:
            return now
        since = CacheInfo(now.hits - self._last.hits, now.total - self._last.total)
        self._last = now
        return since

    def invalidate(self, mm_hash: str) -> None:
        """Nothing: there is no second cache that could differ."""
