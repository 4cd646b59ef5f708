"""The processing of a request's media: each medium once, wherever it is done.

For the place of the one method with which vLLM's renderer processes media. What is kept
is used; what is being processed for another request is waited for; the rest is processed,
by processes of our own or by the renderer itself. vLLM then puts the placeholders into the
prompt as if it had found all of it in its cache.
"""

import asyncio
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from vllm.multimodal.processing import ProcessorInputs
from vllm.renderers import BaseRenderer
from vllm.utils.async_utils import make_async

from common.cache_partition import Partition, hash_within
from common.errors import MmRouterError, OverloadedError
from common.hf_processor_runs import HfProcessorRuns
from common.identity import MmHash
from common.renderer_patches import ByContent, Hashes, patch_renderer
from common.telemetry import PREPROCESS_WAITING, PREPROCESSED, stage
from common.transfer.reference import MediaSource
from frontend.fetch import MISLED_DECODER_ERRORS, DeferredMedium, decoding_mode, for_user, freeze
from frontend.media_limits import MediaError, RequestLimitError
from frontend.processing.backends import Backend, Decodes, Flight
from frontend.processing.batch import Batch, Medium, Processed, processes_apart
from frontend.processing.errors import AbandonedError
from frontend.processing.sources import MediaSources
from frontend.processing.store import ProcessedStore
from frontend.processing.uuids import HashedItems, MediaNames, Namespace, Uuids, check_uuids
from frontend.processing.vllm_cache import StoreCache
from frontend.tenancy import current_partition, current_tenant
from frontend.vllm_errors import as_vllm_error

logger = logging.getLogger(__name__)

HASHES_KEPT: Final = 100_000
"""Media whose hash is remembered, so that they need no decoding."""


Place: TypeAlias = tuple[str, int]
"""Of a medium in a request: its modality, and which of that."""

Named: TypeAlias = Mapping[Place, Processed]
"""The media of a request that are only named, and are kept."""


@dataclass(frozen=True)
class _Wanted:
    key: Hashable
    modality: str
    medium: Medium
    place: str


@dataclass(frozen=True)
class _Kept:
    modality: str
    processed: Processed


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
        """Changes nothing yet: :meth:`take_over` does.

        Args:
            renderer: of a model with media.
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
        self._hashes: OrderedDict[Hashable, MmHash] = OrderedDict()
        self._names = MediaNames()
        self.hashed = HashedItems()
        """The items of all rendered prompts that are still about."""
        self._flights: dict[Hashable, Flight] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._cache = StoreCache(store)
        self._hashing: Hashes | None = None
        self._by_vllm = renderer._process_multimodal
        self._by_vllm_async = make_async(self._with_cache, executor=renderer._mm_executor)
        self._assemble_async = make_async(self._assemble, executor=renderer._mm_executor)
        self.defers = processes_apart(renderer.get_mm_processor())
        """Whether media may come as :class:`DeferredMedium`."""

    def take_over(self, runs: HfProcessorRuns) -> None:
        """Be the renderer's processing of media from now on. Once.

        Args:
            runs: counts what its processor does.
        """
        patch_renderer(
            self._renderer,
            runs=runs,
            hashes=self._hashes_now,
            cache=self._cache,
            process=self.process,
        )

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
        check_uuids(mm_uuids)
        partition = current_partition()
        namespace = Namespace(
            current_tenant.get(), partition, (mm_processor_kwargs or {}, media_io_kwargs or {})
        )
        named = self._named(mm_data, mm_uuids or {}, namespace)
        wanted = _wanted(mm_data, named, mm_processor_kwargs, media_io_kwargs)
        if wanted is None:
            mm_data = {modality: await self._decoded(m) for modality, m in mm_data.items()}
            rendered = await self._by_vllm_async(
                named, partition, prompt, mm_data, mm_processor_kwargs, media_io_kwargs
            )
        else:
            obtained = await self._obtain(
                [each for each in wanted if isinstance(each, _Wanted)],
                mm_processor_kwargs,
                media_io_kwargs,
                partition,
            )
            rendered = await self._assemble_async(
                prompt, wanted, obtained, mm_processor_kwargs, media_io_kwargs
            )
        self._remember(rendered, mm_uuids or {}, namespace)
        return rendered

    def _named(self, mm_data: Mapping[str, Any], mm_uuids: Uuids, namespace: Namespace) -> Named:
        """What is kept of media that come without content.

        Raises:
            ValueError: nothing is kept under a name, or there is no name either; a 400.
        """
        named: dict[Place, Processed] = {}
        for modality, media in mm_data.items():
            uuids = mm_uuids.get(modality) or []
            for index, medium in enumerate(_listed(media)):
                if medium is not None:
                    continue
                uuid = uuids[index] if index < len(uuids) else None
                if uuid is None:
                    raise ValueError(f"{modality} {index + 1} has neither content nor a uuid")
                mm_hash = self._names.recall(namespace, modality, uuid)
                kept = None if mm_hash is None else self._store.get(mm_hash)
                if kept is None:
                    raise ValueError(
                        f"{modality} {index + 1} is only named, and nothing is kept under its "
                        "uuid: show it, together with the uuid"
                    )
                named[modality, index] = kept
        return named

    def _remember(self, rendered: Any, mm_uuids: Uuids, namespace: Namespace) -> None:
        """That the hashes are ours, and which names the media had."""
        for modality, items in rendered["mm_kwargs"].items():
            for item in items:
                self.hashed.add(item)
            hashes, uuids = rendered["mm_hashes"][modality], mm_uuids.get(modality) or []
            if len(uuids) == len(hashes):
                for mm_hash, uuid in zip(hashes, uuids, strict=True):
                    if uuid is not None:
                        self._names.remember(namespace, modality, uuid, MmHash(mm_hash))

    async def close(self) -> None:
        """Stop waiting for batches that are under way."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def clear(self) -> None:
        """Process everything anew from now on."""
        self._hashes.clear()
        self._names.clear()
        self._cache.clear_cache()

    async def _obtain(
        self,
        wanted: Sequence[_Wanted],
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
        partition: Partition,
    ) -> list[Processed]:
        """All media of a request that come with their content, processed; in order."""
        kept: dict[Hashable, Processed] = {}
        boarded: dict[Hashable, Flight] = {}
        fresh: list[_Wanted] = []
        flight: Flight | None
        left: Flight | None
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
            PREPROCESSED.labels("shared" if flight.waiters else "processed").inc()
            flight.waiters += 1
            boarded[each.key] = flight
        PREPROCESSED.labels("kept").inc(len(kept))
        for batch, keys in self._batches(fresh, mm_processor_kwargs, media_io_kwargs, partition):
            task = asyncio.create_task(self._run(batch, keys))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        own = {each.key for each in fresh}
        try:
            for each in wanted:
                if each.key in kept:
                    continue
                try:
                    kept[each.key] = await self._landed(boarded[each.key], each)
                except RequestLimitError as error:
                    if each.key in own:
                        raise for_user(error, each.place) from error
                    # The request that it was begun for may not have it; this one may.
                    again = await self._obtain(
                        [each], mm_processor_kwargs, media_io_kwargs, partition
                    )
                    kept[each.key] = again[0]
        finally:
            for left in boarded.values():
                left.waiters -= 1
            # An error refers to this frame and a flight to the error: what both hold would
            # wait for the garbage collector, and be missing in the budgets until then.
            boarded.clear()
            flight = left = None
        processed = [kept[each.key] for each in wanted]
        if self._sources is not None:
            _keep_sources(
                self._sources, wanted, processed, mm_processor_kwargs, media_io_kwargs, partition
            )
        return processed

    def _kept(self, key: Hashable) -> Processed | None:
        mm_hash = self._hashes.get(key)
        if mm_hash is None:
            return None
        self._hashes.move_to_end(key)
        return self._store.get(mm_hash)

    @staticmethod
    async def _landed(flight: Flight, wanted: _Wanted) -> Processed:
        try:
            return await asyncio.shield(flight.outcome)
        except RequestLimitError:
            raise
        except MediaError as error:
            raise for_user(error, wanted.place) from error
        finally:
            del flight  # see _obtain

    def _batches(
        self,
        fresh: Sequence[_Wanted],
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
        partition: Partition,
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
                    partition,
                )
                yield batch, [each.key for each in some]

    async def _run(self, batch: Batch, keys: Sequence[Hashable]) -> None:
        """Process a batch and land its flights, whatever happens."""
        flights = [self._flights[key] for key in keys]
        try:
            processed = await self._backend.run(batch, flights)
        except AbandonedError as error:
            if any(flight.waiters for flight in flights):  # somebody came at the last moment
                await self._run(batch, keys)
            else:
                self._land(keys, [error] * len(keys))
        except Exception as error:  # noqa: BLE001 # raised where the flight is waited for
            _forget_frames(error)
            if len(keys) == 1 or isinstance(error, (RequestLimitError, OverloadedError)):
                self._land(keys, [error] * len(keys))
            else:
                # Not all of them need be at fault, and others may wait for the rest.
                for medium, key in zip(batch.media, keys, strict=True):
                    await self._run(dataclasses.replace(batch, media=[medium]), [key])
        else:
            for key, each in zip(keys, processed, strict=True):
                self._hashes[key] = each.mm_hash
            while len(self._hashes) > HASHES_KEPT:
                self._hashes.popitem(last=False)
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
        wanted: Sequence[_Wanted | _Kept],
        obtained: Sequence[Processed],
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
    ) -> Any:
        """vLLM's own assembly of a prompt whose media are all in its cache.

        vLLM lets a medium be named rather than shown if it is cached, so all are named by
        their hashes.
        """
        coming = iter(obtained)
        processed = [each.processed if isinstance(each, _Kept) else next(coming) for each in wanted]
        names: dict[str, list[MmHash]] = {}
        for each, made in zip(wanted, processed, strict=True):
            names.setdefault(each.modality, []).append(made.mm_hash)

        def known(_: ByContent, __: ProcessorInputs) -> dict[str, list[MmHash]]:
            # What vLLM would make of names would depend on the request's options again.
            return {modality: list(hashes) for modality, hashes in names.items()}

        with self._hashed_by(known), self._cache.request(processed):
            return self._by_vllm(
                prompt,
                {modality: [None] * len(hashes) for modality, hashes in names.items()},
                names,
                mm_processor_kwargs,
                media_io_kwargs,
            )

    def _with_cache(
        self,
        named: Named,
        partition: Partition,
        prompt: list[int],
        mm_data: Mapping[str, Any],
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
    ) -> Any:
        """vLLM's own processing, over our store and with our hashes."""

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

        names = {
            modality: [
                named[modality, index].mm_hash if (modality, index) in named else None
                for index in range(len(_listed(media)))
            ]
            for modality, media in mm_data.items()
            if any(place[0] == modality for place in named)
        }
        with self._hashed_by(hashes), self._cache.request(named.values()):
            return self._by_vllm(prompt, mm_data, names, mm_processor_kwargs, media_io_kwargs)

    @contextmanager
    def _hashed_by(self, hashes: Hashes) -> Iterator[None]:
        """Let vLLM get one request's hashes from a function. On the renderer's one thread."""
        self._hashing = hashes
        try:
            yield
        finally:
            self._hashing = None

    def _hashes_now(
        self, by_content: ByContent, inputs: ProcessorInputs
    ) -> Mapping[str, list[MmHash]]:
        if self._hashing is None:  # by a backend, apart from the request that shows the media
            return by_content(inputs)
        return self._hashing(by_content, inputs)

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


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what was decoded before an error: flights keep it until they are gone."""
    while error is not None and error.__traceback__ is not None:
        if not isinstance(error, (MmRouterError, ValueError, *MISLED_DECODER_ERRORS)):
            logger.error("processing of media failed", exc_info=error)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _listed(media: Any) -> list[Any]:
    """Media one by one; embeddings may come as a single tensor instead."""
    return media if isinstance(media, list) else []


def _wanted(
    mm_data: Mapping[str, Any],
    named: Named,
    mm_processor_kwargs: Mapping[str, object] | None,
    media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
) -> list[_Wanted | _Kept] | None:
    """A request's media, or None if some of them can't be processed apart.

    That is so for embeddings, and for the sound of a video, which some models process
    together with its pictures.
    """
    if (mm_processor_kwargs or {}).get("use_audio_in_video"):
        return None
    options = freeze([mm_processor_kwargs or {}, media_io_kwargs or {}])
    wanted: list[_Wanted | _Kept] = []
    for modality, media in mm_data.items():
        if not _listed(media):
            return None
        for index, medium in enumerate(media):
            if (kept := named.get((modality, index))) is not None:
                wanted.append(_Kept(modality, kept))
                continue
            if not isinstance(medium, DeferredMedium):
                return None
            content, mode = medium.content, decoding_mode(medium.media_io)
            key: Hashable = (modality, content.digest, mode, options)
            if mode is None or options is None:
                key = object()  # like no other
            wanted.append(_Wanted(key, modality, Medium(content, medium.media_io), medium.place))
    return wanted


def _keep_sources(
    sources: MediaSources,
    wanted: Sequence[_Wanted],
    processed: Sequence[Processed],
    mm_processor_kwargs: Mapping[str, object] | None,
    media_io_kwargs: Mapping[str, Mapping[str, object]] | None,
    partition: Partition,
) -> None:
    for each, made in zip(wanted, processed, strict=True):
        if not each.medium.content.jpeg_frames:
            source = MediaSource(
                each.modality,
                each.medium.content.data,
                dict(mm_processor_kwargs or {}),  # type: ignore[arg-type] # JSON in a request
                dict(media_io_kwargs or {}),  # type: ignore[arg-type] # likewise
                partition,
            )
            sources.keep(made.mm_hash, source)
