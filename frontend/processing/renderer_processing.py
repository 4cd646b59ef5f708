"""vLLM's own processing of a prompt's media, over our store and under our hashes.

Wraps the renderer's method, on its one thread, for one prompt at a time.
"""

import asyncio
import dataclasses
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

from vllm.multimodal.cache.base import (
    BaseMultiModalProcessorCache,
    MultiModalProcessorCacheInItem,
    MultiModalProcessorCacheOutItem,
)
from vllm.multimodal.processing import ProcessorInputs
from vllm.renderers import BaseRenderer
from vllm.utils.cache import CacheInfo

from common.identity import MmHash
from common.media.cache_partition import Partition, hash_within
from common.observability.watchdog import allow
from common.vllm_compat.renderer_patches import (
    ByContent,
    Hashes,
    HfProcessorRuns,
    MediaProcess,
    patch_renderer,
)
from frontend.fetch import ProcessorMemory, seconds_to_process
from frontend.processing.batch import MediaOptions, Processed
from frontend.processing.errors import NoPlaceError, said_by_processor
from frontend.processing.prompt_media import ByPlace, MediaData, listed
from frontend.processing.store import ProcessedStore


class _AtHand(threading.local):
    """Items of the request that a thread works for."""

    def __init__(self) -> None:
        self.items: dict[MmHash, Processed] = {}
        self.alone = False
        """Whether nothing else that is kept counts."""


class StoreCache(BaseMultiModalProcessorCache):
    """vLLM's processor cache over our store, for the renderer's one thread and one request at a
    time.

    Items at hand are per thread: a stuck thread may return beside its replacement.
    """

    def __init__(self, store: ProcessedStore) -> None:
        super().__init__()
        self._store = store
        self._at_hand = _AtHand()
        self._hits = self._total = 0
        self._last = CacheInfo(0, 0)

    @contextmanager
    def request(self, at_hand: Iterable[Processed] = ()) -> Iterator[None]:
        """Scope vLLM's look-ups to one request, and hold its items, so that none reported as cached
        is evicted before use. ``at_hand`` items need no processing.
        """
        self._at_hand.items = {each.mm_hash: each for each in at_hand}
        self._at_hand.alone = False
        try:
            yield
        finally:
            self._at_hand.items = {}

    def keep_together(self, mm_hashes: Iterable[MmHash]) -> None:
        """Process all these media anew unless all are kept: vLLM can't process a film without its
        sound, which may be kept with other pictures.
        """
        given = dict(self._at_hand.items)
        if not all(map(self.is_cached_item, mm_hashes)):
            self._at_hand.items, self._at_hand.alone = given, True

    def is_cached_item(self, mm_hash: str) -> bool:
        name = MmHash(mm_hash)
        self._total += 1
        if name not in self._at_hand.items:
            kept = None if self._at_hand.alone else self._store.get(name)
            if kept is None:
                return False
            self._at_hand.items[name] = kept
        self._hits += 1
        return True

    def get_and_update_item(
        self, mm_item: MultiModalProcessorCacheInItem, mm_hash: str
    ) -> MultiModalProcessorCacheOutItem:
        """Return the kept item, or keep ``mm_item``."""
        name = MmHash(mm_hash)
        kept = self._at_hand.items.get(name)
        if kept is None:
            assert mm_item is not None, "vLLM processes what it was told is not cached"
            kept = self._at_hand.items[name] = self._store.put(Processed(name, *mm_item))
        return kept.item, kept.prompt_updates

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Do nothing: items at hand are held."""

    def clear_cache(self) -> None:
        self._store.clear()
        self._at_hand.items = {}
        self._hits = self._total = 0
        self._last = CacheInfo(0, 0)

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        now = CacheInfo(self._hits, self._total)
        if not delta:
            return now
        since = CacheInfo(now.hits - self._last.hits, now.total - self._last.total)
        self._last = now
        return since

    def invalidate(self, mm_hash: str) -> None:
        """Do nothing: no second cache could differ."""


_NO_PLACE: Final = re.compile(
    r"Failed to apply prompt replacement|Expected there to be \d+ prompt (placeholders|updates)"
)
"""Prefixes of vLLM's own errors, which its server answers with a 500."""


class RendererProcessing:
    """One renderer's media processing, with hashes set for each prompt."""

    def __init__(self, renderer: BaseRenderer, store: ProcessedStore) -> None:
        """Changes nothing before :meth:`take_over`."""
        self._renderer = renderer
        self._cache = StoreCache(store)
        self._hashing = _Hashing()
        self._by_vllm = renderer._process_multimodal
        self._processor = renderer.get_mm_processor()
        self._executor = renderer._mm_executor

    def take_over(self, runs: HfProcessorRuns, process: MediaProcess) -> None:
        """Make the renderer use our cache, hashes and ``process``. Call once."""
        patch_renderer(
            self._renderer,
            runs=runs,
            hashes=self._hashes_now,
            cache=self._cache,
            process=process,
        )

    async def assemble(
        self, prompt: list[int], media: Sequence[tuple[str, Processed]], options: MediaOptions
    ) -> Any:
        """Assemble a prompt by vLLM's own code. ``media`` are processed, with modality, in its
        order.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._assemble, prompt, media, options)

    async def process(
        self,
        prompt: list[int],
        mm_data: MediaData,
        options: MediaOptions,
        named: ByPlace,
        partition: Partition,
    ) -> Any:
        """Process a prompt's media by vLLM's own code. ``mm_data`` are decoded, ``named`` those
        only named. Raises ValueError if vLLM refuses them.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, self._process, prompt, mm_data, options, named, partition
        )

    def clear(self) -> None:
        self._cache.clear_cache()

    def _assemble(
        self, prompt: list[int], media: Sequence[tuple[str, Processed]], options: MediaOptions
    ) -> Any:
        # vLLM accepts a name instead of a cached medium, so all are named by their hashes.
        names: dict[str, list[MmHash]] = {}
        for modality, processed in media:
            names.setdefault(modality, []).append(processed.mm_hash)

        def known(_: ByContent, __: ProcessorInputs) -> dict[str, list[MmHash]]:
            # vLLM's hashes of names would depend on the request's options again.
            return {modality: list(hashes) for modality, hashes in names.items()}

        nothing = {modality: [None] * len(hashes) for modality, hashes in names.items()}
        with self._hashed_by(known), self._cache.request(each for _, each in media), _placing():
            return self._by_vllm(prompt, nothing, names, *options)

    def _process(
        self,
        prompt: list[int],
        mm_data: MediaData,
        options: MediaOptions,
        named: ByPlace,
        partition: Partition,
    ) -> Any:
        allow(seconds_to_process(mm_data))
        # Options of a request may enlarge each medium to its limit, so all have one together.
        media = 1 if options.mm_processor_kwargs else sum(map(len, map(listed, mm_data.values())))

        def hashes(by_content: ByContent, inputs: ProcessorInputs) -> dict[str, list[MmHash]]:
            # Never by names. vLLM also has its own: it numbers media that it need not recognize,
            # but workers know the media of many frontends.
            found = by_content(dataclasses.replace(inputs, mm_uuid_items=None))
            names = {
                modality: [
                    named[modality, index].mm_hash
                    if (modality, index) in named
                    else hash_within(mm_hash, partition)
                    for index, mm_hash in enumerate(mm_hashes)
                ]
                for modality, mm_hashes in found.items()
            }
            if options.mm_processor_kwargs.get("use_audio_in_video"):
                self._cache.keep_together(chain(*names.values()))
            return names

        with (
            self._hashed_by(hashes),
            self._cache.request(named.values()),
            _placing(),
            said_by_processor(),
            ProcessorMemory(self._processor, media) as memory,
        ):
            memory.take_sounds(len(listed(mm_data.get("audio"))))
            return self._by_vllm(prompt, mm_data, _names(mm_data, named), *options)

    @contextmanager
    def _hashed_by(self, hashes: Hashes) -> Iterator[None]:
        """Make vLLM get one prompt's hashes from a function."""
        self._hashing.now = hashes
        try:
            yield
        finally:
            self._hashing.now = None

    def _hashes_now(
        self, by_content: ByContent, inputs: ProcessorInputs
    ) -> Mapping[str, list[MmHash]]:
        if self._hashing.now is None:  # a backend's run, outside of a request
            return by_content(inputs)
        return self._hashing.now(by_content, inputs)


class _Hashing(threading.local):
    """Source of hashes for a thread's prompt; per thread, since a stuck one may return."""

    now: Hashes | None = None


@contextmanager
def _placing() -> Iterator[None]:
    """Raise NoPlaceError if a prompt has no place for its media, while vLLM inserts them."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        if not _NO_PLACE.match(str(error)):
            raise
        raise NoPlaceError(
            "the prompt has no place for some of its media, which truncate_prompt_tokens may "
            f"have cut off, or which text of the request is taken for: {error}"
        ) from error


def _names(mm_data: MediaData, named: ByPlace) -> dict[str, list[MmHash | None]]:
    """Return the hashes of modalities with named media, as vLLM wants them."""
    return {
        modality: [
            named[modality, index].mm_hash if (modality, index) in named else None
            for index in range(len(listed(media)))
        ]
        for modality, media in mm_data.items()
        if any(place[0] == modality for place in named)
    }
