"""The processing of a request's media: each medium once, wherever it is done.

Takes the place of the one method with which vLLM's renderer processes media. What is kept
is used; what is being processed for another request is waited for; the rest is processed,
by processes of our own or by the renderer itself. vLLM then puts the placeholders into the
prompt as if it had found all of it in its cache.
"""

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers import BaseRenderer
from vllm.utils.async_utils import make_async

from common.errors import MmRouterError, OverloadedError
from common.identity import MmHash
from common.telemetry import PREPROCESS_WAITING, PREPROCESSED, stage
from common.transfer.reference import MediaSource
from frontend.fetch.connector import for_user
from frontend.fetch.deferred import DeferredMedium
from frontend.fetch.errors import MediaError
from frontend.fetch.mode import decoding_mode, freeze
from frontend.processing.backends import Backend, Decodes, Flight
from frontend.processing.batch import Batch, Medium, Processed, processes_apart
from frontend.processing.errors import AbandonedError
from frontend.processing.sources import MediaSources
from frontend.processing.store import ProcessedStore
from frontend.processing.vllm_cache import StoreCache
from frontend.vllm_errors import as_vllm_error

MOST_WAITING: Final = 256
"""Requests with media that may be under way, unless told otherwise."""

NAMES_KEPT: Final = 100_000
"""Media whose hash is remembered, so that they need no decoding."""


@dataclass(frozen=True)
class _Wanted:
    key: Hashable
    modality: str
    medium: Medium
    place: str


class MediaProcessing:
    """Media processing of one frontend. For one event loop."""

    def __init__(
        self,
        renderer: BaseRenderer,
        store: ProcessedStore,
        backend: Backend,
        decode: Decodes,
        *,
        most_waiting: int,
        sources: MediaSources | None = None,
    ) -> None:
        """Take over a renderer's media processing.

        Args:
            store: keeps what was processed.
            backend: does the work.
            decode: decodes a medium that vLLM has to see.
            most_waiting: requests whose media may be under way at the same time.
            sources: keeps media as fetched, if anyone wants them.
        """
        self._renderer = renderer
        self._store = store
        self._backend = backend
        self._decode = decode
        self._most_waiting = most_waiting
        self._sources = sources
        self._waiting = 0
        self._names: OrderedDict[Hashable, MmHash] = OrderedDict()
        self._flights: dict[Hashable, Flight] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._processor = renderer.get_mm_processor()
        cache = StoreCache(store)
        self._cache = cache
        for replaced in (renderer._mm_processor_cache, renderer._mm_processor_only_cache):
            if replaced is not None:
                replaced.close()
        renderer._mm_processor_cache = renderer._mm_processor_only_cache = cache
        self._by_vllm = renderer._process_multimodal
        self._by_vllm_async = make_async(self._with_cache, executor=renderer._mm_executor)
        self._assemble_async = make_async(self._assemble, executor=renderer._mm_executor)
        renderer._process_multimodal_async = self.process
        self.defers = processes_apart(self._processor)
        """Whether media may come as :class:`DeferredMedium`."""

    async def process(
        self,
        prompt: list[int],
        mm_data: Mapping[str, Any],
        mm_uuids: Mapping[str, Any] | None,
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        """What the renderer's method of that name does, with the same arguments.

        Raises:
            ValueError: a medium is no good; a 400.
            VLLMError: of the status that the request should get: 429 if too many requests
                wait for their media, 422 if processing broke.
        """
        if self._waiting >= self._most_waiting:
            error = OverloadedError(
                f"{self._waiting} requests with media are being processed already; try again later"
            )
            raise as_vllm_error(error) from error
        self._waiting += 1
        PREPROCESS_WAITING.set(self._waiting)
        try:
            with stage("process_media"):
                return await self._process(
                    prompt, mm_data, mm_uuids, mm_processor_kwargs, media_io_kwargs
                )
        except MmRouterError as error:
            raise as_vllm_error(error) from error
        finally:
            self._waiting -= 1
            PREPROCESS_WAITING.set(self._waiting)

    async def _process(
        self,
        prompt: list[int],
        mm_data: Mapping[str, Any],
        mm_uuids: Mapping[str, Any] | None,
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
    ) -> Any:
        wanted = _wanted(mm_data, mm_uuids, mm_processor_kwargs, media_io_kwargs)
        if wanted is None:
            mm_data = {modality: await self._decoded(m) for modality, m in mm_data.items()}
            return await self._by_vllm_async(
                prompt, mm_data, mm_uuids, mm_processor_kwargs, media_io_kwargs
            )
        processed = await self._obtain(wanted, mm_processor_kwargs, media_io_kwargs)
        return await self._assemble_async(
            prompt, wanted, processed, mm_processor_kwargs, media_io_kwargs
        )

    async def close(self) -> None:
        """Stop waiting for batches that are under way."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def clear(self) -> None:
        """Process everything anew from now on."""
        self._names.clear()
        self._cache.clear_cache()

    async def _obtain(
        self,
        wanted: Sequence[_Wanted],
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
    ) -> list[Processed]:
        """All media of a request, processed; in order."""
        kept: dict[Hashable, Processed] = {}
        boarded: dict[Hashable, Flight] = {}
        fresh: list[_Wanted] = []
        for each in wanted:
            if each.key in kept or each.key in boarded:
                continue
            if (found := self._kept(each.key)) is not None:
                kept[each.key] = found
                continue
            flight = self._flights.get(each.key)
            if flight is None:
                flight = self._flights[each.key] = Flight()
                fresh.append(each)
            PREPROCESSED.labels("shared" if flight.aboard else "processed").inc()
            flight.aboard += 1
            boarded[each.key] = flight
        PREPROCESSED.labels("kept").inc(len(kept))
        for batch, keys in self._batches(fresh, mm_processor_kwargs, media_io_kwargs):
            task = asyncio.create_task(self._run(batch, keys))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        try:
            for each in wanted:
                if each.key not in kept:
                    kept[each.key] = await self._landed(boarded[each.key], each)
        finally:
            for flight in boarded.values():
                flight.aboard -= 1
        processed = [kept[each.key] for each in wanted]
        if self._sources is not None:
            _keep_sources(self._sources, wanted, processed, mm_processor_kwargs, media_io_kwargs)
        return processed

    def _kept(self, key: Hashable) -> Processed | None:
        name = self._names.get(key)
        if name is None:
            return None
        self._names.move_to_end(key)
        return self._store.get(name)

    @staticmethod
    async def _landed(flight: Flight, wanted: _Wanted) -> Processed:
        try:
            return await asyncio.shield(flight.outcome)
        except MediaError as error:
            raise for_user(error, wanted.place) from error

    def _batches(
        self,
        fresh: Sequence[_Wanted],
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
    ) -> Iterable[tuple[Batch, list[Hashable]]]:
        """As many batches for each modality as can be worked on at the same time."""
        by_modality: dict[str, list[_Wanted]] = {}
        for each in fresh:
            by_modality.setdefault(each.modality, []).append(each)
        for modality, members in by_modality.items():
            size = -(-len(members) // self._backend.width)
            for start in range(0, len(members), size):
                some = members[start : start + size]
                batch = Batch(
                    modality,
                    [each.medium for each in some],
                    mm_processor_kwargs or {},
                    media_io_kwargs or {},
                )
                yield batch, [each.key for each in some]

    async def _run(self, batch: Batch, keys: Sequence[Hashable]) -> None:
        """Process a batch and land its flights, whatever happens."""
        flights = [self._flights[key] for key in keys]
        try:
            processed = await self._backend.run(batch, flights)
        except AbandonedError as error:
            if any(flight.aboard for flight in flights):  # somebody came at the last moment
                await self._run(batch, keys)
            else:
                self._land(keys, [error] * len(keys))
        except Exception as error:  # noqa: BLE001 # raised where the flight is waited for
            if len(keys) == 1:
                self._land(keys, [error])
            else:
                # Not all of them need be at fault, and others may wait for the rest.
                for medium, key in zip(batch.media, keys, strict=True):
                    await self._run(dataclasses.replace(batch, media=[medium]), [key])
        else:
            for key, each in zip(keys, processed, strict=True):
                self._names[key] = each.mm_hash
            while len(self._names) > NAMES_KEPT:
                self._names.popitem(last=False)
            self._land(keys, processed)

    def _land(self, keys: Sequence[Hashable], outcomes: Sequence[Processed | Exception]) -> None:
        for key, outcome in zip(keys, outcomes, strict=True):
            future = self._flights.pop(key).outcome
            if isinstance(outcome, Processed):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
                future.exception()  # seen, also if everybody has gone

    def _assemble(
        self,
        prompt: list[int],
        wanted: Sequence[_Wanted],
        processed: Sequence[Processed],
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
    ) -> Any:
        """vLLM's own assembly of a prompt whose media are all in its cache.

        vLLM lets a medium be named rather than shown if it is cached, so all are named by
        their hashes.
        """
        names: dict[str, list[MmHash]] = {}
        for each, made in zip(wanted, processed, strict=True):
            names.setdefault(each.modality, []).append(made.mm_hash)
        processor = self._processor

        def known(_: ProcessorInputs) -> dict[str, list[MmHash]]:
            # What vLLM would make of names would depend on the request's options again.
            return {modality: list(hashes) for modality, hashes in names.items()}

        processor._get_mm_hashes = known
        try:
            with self._cache.request(processed):
                return self._by_vllm(
                    prompt,
                    {modality: [None] * len(hashes) for modality, hashes in names.items()},
                    names,
                    mm_processor_kwargs,
                    media_io_kwargs,
                )
        finally:
            del processor._get_mm_hashes

    def _with_cache(self, *args: Any) -> Any:
        with self._cache.request():
            return self._by_vllm(*args)

    async def _decoded(self, media: Any) -> Any:
        """Media as vLLM wants them, deferred ones decoded."""
        if not isinstance(media, list):
            return media
        return [
            await self._decode(each.content, each.media_io)
            if isinstance(each, DeferredMedium)
            else each
            for each in media
        ]


def _wanted(
    mm_data: Mapping[str, Any],
    mm_uuids: Mapping[str, Any] | None,
    mm_processor_kwargs: Mapping[str, object] | None,
    media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
) -> list[_Wanted] | None:
    """A request's media, or None if some of them can't be processed apart.

    That is so for embeddings, for media that are named only, and for the sound of a video,
    which some models process together with its pictures.
    """
    if (mm_processor_kwargs or {}).get("use_audio_in_video"):
        return None
    options = freeze([mm_processor_kwargs or {}, media_io_kwargs or {}])
    wanted: list[_Wanted] = []
    for modality, media in mm_data.items():
        if not isinstance(media, list) or not media:
            return None
        uuids = (mm_uuids or {}).get(modality) or [None] * len(media)
        for medium, uuid in zip(media, uuids, strict=True):
            if not isinstance(medium, DeferredMedium):
                return None
            content, mode = medium.content, decoding_mode(medium.media_io)
            key: Hashable = (modality, content.digest, mode, uuid, options)
            if mode is None or options is None:
                key = object()  # like no other
            wanted.append(
                _Wanted(key, modality, Medium(content, medium.media_io, uuid), medium.place)
            )
    return wanted


def _keep_sources(
    sources: MediaSources,
    wanted: Sequence[_Wanted],
    processed: Sequence[Processed],
    mm_processor_kwargs: Mapping[str, object] | None,
    media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
) -> None:
    for each, made in zip(wanted, processed, strict=True):
        if not each.medium.content.jpeg_frames:
            source = MediaSource(
                each.modality,
                each.medium.content.data,
                dict(mm_processor_kwargs or {}),  # type: ignore[arg-type] # JSON in a request
                dict(media_io_kwargs or {}),  # type: ignore[arg-type] # likewise
            )
            sources.keep(made.mm_hash, source)
