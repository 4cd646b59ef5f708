"""Process a prompt's media, each medium once.

Replaces the method with which vLLM's renderer processes media. Once all are processed, vLLM places
them into the prompt as if found in its cache.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from vllm.renderers import BaseRenderer

from common.errors import MmRouterError, OverloadedError
from common.identity import MmHash
from common.lru import Lru
from common.media.cache_partition import Partition
from common.media.decoded_media import check_decoded
from common.observability.telemetry import PREPROCESS_WAITING, stage
from common.transfer.base import MediaSource
from common.vllm_compat.renderer_patches import HfProcessorRuns
from frontend.asgi import as_vllm_error, blaming_a_lack_of_files
from frontend.fetch import MISLED_DECODER_ERRORS, DeferredMedium, arrived
from frontend.processing.backends import Backend, Decodes
from frontend.processing.batch import MediaOptions, Processed, longest_prompt, may_defer
from frontend.processing.client_tensors import HashedItems
from frontend.processing.errors import (
    MissingPackageError,
    ProcessingFailedError,
    missing_package,
)
from frontend.processing.processed_once import ProcessedOnce
from frontend.processing.prompt_media import (
    Kept,
    MediaData,
    NamedMedia,
    Namespace,
    Shown,
    Uuids,
    check_uuids,
    listed,
    media_apart,
    with_shown,
)
from frontend.processing.renderer_processing import RendererProcessing
from frontend.processing.store import ProcessedStore
from frontend.request_context import current_context, current_partition

logger = logging.getLogger(__name__)

_ANSWERED_BY_VLLM = (ValueError, TypeError, OverflowError, NotImplementedError)
"""Errors that vLLM's server answers with a 4xx or 501."""

_LED_ASTRAY = (*MISLED_DECODER_ERRORS, ImportError, MemoryError)
"""Errors of processors for a request's contradictory options."""

MediaSources = Lru[MmHash, MediaSource]
"""Media as fetched, for workers that process them themselves. For one event loop."""

MAX_WAITING: Final = 256
"""Requests with media in processing or queued: seconds of work for any machine."""


class MediaProcessing:
    """Media processing of one frontend. For one event loop."""

    def __init__(
        self,
        renderer: BaseRenderer,
        store: ProcessedStore,
        backend: Backend,
        decode: Decodes,
        *,
        most_waiting: int = MAX_WAITING,
        sources: MediaSources | None = None,
    ) -> None:
        """Changes nothing before :meth:`take_over`. ``decode`` is for media that vLLM must see;
        ``sources``, if given, keeps media as fetched.
        """
        self._renderer = renderer
        self._decode = decode
        self._most_waiting = most_waiting
        self._sources = sources
        self._waiting = 0
        self._named = NamedMedia(store)
        self._once = ProcessedOnce(store, backend, longest_prompt(renderer.get_mm_processor()))
        self._by_renderer = RendererProcessing(renderer, store)
        self.hashed = HashedItems()
        """The items of all rendered prompts that are still referenced."""
        self.by_options = HashedItems()
        """The subset that a request's ``mm_processor_kwargs`` influenced."""
        self.defers = may_defer(renderer.get_mm_processor())
        """Whether media may come as :class:`DeferredMedium`."""

    def take_over(self, runs: HfProcessorRuns) -> None:
        """Replace the renderer's media processing. Call once. ``runs`` counts its HF processor's
        runs.
        """
        self._by_renderer.take_over(runs, self.process)

    async def process(
        self,
        prompt: list[int],
        mm_data: MediaData,
        mm_uuids: Uuids | None,
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        """Replace the renderer's method of that name, with the same arguments.

        Raises:
            ValueError: a medium is unusable; a 400.
            VLLMError: 429 if too many requests wait for their media, 422 if processing failed, 503
                if no file can be opened.
        """
        options = MediaOptions(mm_processor_kwargs or {}, media_io_kwargs or {})
        mm_data = {
            modality: await arrived(listed(each)) or each for modality, each in mm_data.items()
        }
        for modality, media in mm_data.items():
            check_decoded(modality, media)
        try:
            with self._admitted(), stage("process_media"), blaming_a_lack_of_files():
                return await self._process(prompt, mm_data, mm_uuids or {}, options)
        except MmRouterError as error:
            raise as_vllm_error(error) from error
        except _ANSWERED_BY_VLLM:
            raise
        except _LED_ASTRAY as error:
            # vLLM's server would answer a request's odd options with a 500; process backends answer
            # so.
            logger.exception("processing of media failed")
            failed: MmRouterError = ProcessingFailedError.about(str(error))
            if (package := missing_package(error)) is not None:
                failed = MissingPackageError(package)
            raise as_vllm_error(failed) from error

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._waiting >= self._most_waiting:
            raise OverloadedError(
                f"{self._waiting} requests with media are being processed already; try again later"
            )
        self._waiting += 1
        PREPROCESS_WAITING.inc()
        try:
            yield
        finally:
            self._waiting -= 1
            PREPROCESS_WAITING.dec()

    async def _process(
        self, prompt: list[int], mm_data: MediaData, mm_uuids: Uuids, options: MediaOptions
    ) -> Any:
        check_uuids(mm_uuids)
        mm_data = with_shown(mm_data, mm_uuids)
        partition = current_partition()
        namespace = Namespace(current_context().tenant, partition, options)
        named = await self._named.find(mm_data, mm_uuids, namespace)
        media = media_apart(mm_data, named, options)
        if media is None:
            decoded = {modality: await self._decoded(each) for modality, each in mm_data.items()}
            rendered = await self._by_renderer.process(prompt, decoded, options, named, partition)
        else:
            processed = await self._processed(media, options, partition)
            rendered = await self._by_renderer.assemble(prompt, processed, options)
        for items in rendered["mm_kwargs"].values():
            for item in items:
                self.hashed.add(item)
                if options.mm_processor_kwargs:
                    self.by_options.add(item)
        await self._named.remember(rendered["mm_hashes"], mm_uuids, namespace)
        return rendered

    async def _processed(
        self, media: Sequence[Shown | Kept], options: MediaOptions, partition: Partition
    ) -> list[tuple[str, Processed]]:
        """Return all media of a prompt, each with its modality."""
        shown = [each for each in media if isinstance(each, Shown)]
        obtained = await self._once.obtain(shown, options, partition)
        if self._sources is not None:
            _keep_sources(self._sources, shown, obtained, options, partition)
        coming = iter(obtained)
        return [
            (each.modality, each.processed if isinstance(each, Kept) else next(coming))
            for each in media
        ]

    async def _decoded(self, media: object) -> object:
        """Decode the deferred media."""
        if not isinstance(media, list):
            return media
        return [
            await self._decode(each.content, each.media_io)
            if isinstance(each, DeferredMedium)
            else each
            for each in media
        ]

    def clear(self) -> None:
        """Process all media anew from now on."""
        self._once.forget()
        self._named.forget()
        self._by_renderer.clear()

    async def close(self) -> None:
        """Stop waiting for batches under way."""
        await self._once.close()


def _keep_sources(
    sources: MediaSources,
    shown: Sequence[Shown],
    processed: Sequence[Processed],
    options: MediaOptions,
    partition: Partition,
) -> None:
    for each, made in zip(shown, processed, strict=True):
        if not each.medium.content.jpeg_frames:
            source = MediaSource(
                each.modality,
                each.medium.content.data,
                dict(options.mm_processor_kwargs),  # type: ignore[arg-type] # JSON in a request
                dict(options.media_io_kwargs),  # type: ignore[arg-type] # likewise
                partition,
            )
            sources.put(made.mm_hash, source)
