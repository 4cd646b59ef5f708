"""vLLM's own processing of a prompt's media, over our store and under our hashes.

Takes the place of the renderer's, and calls it: on the renderer's one thread, for one
prompt at a time.
"""

import asyncio
import dataclasses
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


_NO_PLACE: Final = re.compile(
    r"Failed to apply prompt replacement|Expected there to be \d+ prompt (placeholders|updates)"
)
"""How vLLM's own errors begin, for which its server has a 500."""


class RendererProcessing:
    """One renderer's method, and what it is told of each prompt."""

    def __init__(self, renderer: BaseRenderer, store: ProcessedStore) -> None:
        """Changes nothing yet: :meth:`take_over` does.

        Args:
            renderer: of a model with media.
            store: keeps what was processed.
        """
        self._renderer = renderer
        self._cache = StoreCache(store)
        self._hashing = _Hashing()
        self._by_vllm = renderer._process_multimodal
        self._processor = renderer.get_mm_processor()
        self._executor = renderer._mm_executor

    def take_over(self, runs: HfProcessorRuns, process: MediaProcess) -> None:
        """Have the renderer use our cache and hashes from now on. Once.

        Args:
            runs: counts what its processor does.
            process: what it calls for a prompt's media.
        """
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
        """vLLM's own assembly of a prompt whose media are all processed.

        Args:
            media: each with its modality, in the order of the prompt.
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
        """vLLM's own processing of a prompt's media.

        Args:
            mm_data: decoded.
            named: those of them that are only named.
            partition: of the request.

        Raises:
            ValueError: vLLM refuses them.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, self._process, prompt, mm_data, options, named, partition
        )

    def clear(self) -> None:
        """Answer vLLM no more with what was kept until now."""
        self._cache.clear_cache()

    def _assemble(
        self, prompt: list[int], media: Sequence[tuple[str, Processed]], options: MediaOptions
    ) -> Any:
        # vLLM lets a medium be named rather than shown if it is cached, so all are named by
        # their hashes.
        names: dict[str, list[MmHash]] = {}
        for modality, processed in media:
            names.setdefault(modality, []).append(processed.mm_hash)

        def known(_: ByContent, __: ProcessorInputs) -> dict[str, list[MmHash]]:
            # What vLLM would make of names would depend on the request's options again.
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

        def hashes(by_content: ByContent, inputs: ProcessorInputs) -> dict[str, list[MmHash]]:
            # Never by names, of which vLLM has its own too: it numbers media if it need
            # not know them again, but workers know the media of many frontends.
            found = by_content(dataclasses.replace(inputs, mm_uuid_items=None))
            return {
                modality: [
                    named[modality, index].mm_hash
                    if (modality, index) in named
                    else hash_within(mm_hash, partition)
                    for index, mm_hash in enumerate(mm_hashes)
                ]
                for modality, mm_hashes in found.items()
            }

        with (
            self._hashed_by(hashes),
            self._cache.request(named.values()),
            _placing(),
            said_by_processor(),
            ProcessorMemory(self._processor, sum(map(len, map(listed, mm_data.values())))),
        ):
            return self._by_vllm(prompt, mm_data, _names(mm_data, named), *options)

    @contextmanager
    def _hashed_by(self, hashes: Hashes) -> Iterator[None]:
        """Let vLLM get one prompt's hashes from a function."""
        self._hashing.now = hashes
        try:
            yield
        finally:
            self._hashing.now = None

    def _hashes_now(
        self, by_content: ByContent, inputs: ProcessorInputs
    ) -> Mapping[str, list[MmHash]]:
        if self._hashing.now is None:  # by a backend, apart from the request that shows the media
            return by_content(inputs)
        return self._hashing.now(by_content, inputs)


class _Hashing(threading.local):
    """Where the hashes of a thread's prompt come from. One that was stuck may come back, beside
    the thread that took its place."""

    now: Hashes | None = None


@contextmanager
def _placing() -> Iterator[None]:
    """While vLLM puts media into a prompt. Raises NoPlaceError if that has no place for them."""
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
    """Of the modalities in which a medium is only named, as vLLM wants them: by its hash."""
    return {
        modality: [
            named[modality, index].mm_hash if (modality, index) in named else None
            for index in range(len(listed(media)))
        ]
        for modality, media in mm_data.items()
        if any(place[0] == modality for place in named)
    }
