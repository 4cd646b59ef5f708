"""Media as fetched, by hash, for workers that process them themselves.

vLLM's serving code hands the engine tensors only. This looks over the renderer's
shoulder at the one place where a medium's encoded bytes and its hash meet.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.multimodal.media import MediaWithBytes
from vllm.renderers import BaseRenderer
from vllm.utils.async_utils import make_async

from common.identity import MmHash
from common.transfer.reference import MediaSource

BUDGET_BYTES = 1 << 30
"""Encoded media kept. A request whose source is gone is served inline."""


class MediaSources:
    """The last media that a renderer processed."""

    def __init__(self, renderer: BaseRenderer) -> None:
        self._sources: OrderedDict[MmHash, MediaSource] = OrderedDict()
        self._bytes = 0
        original = renderer._process_multimodal

        def recorded(
            prompt: list[int],
            mm_data: Mapping[str, Any],
            mm_uuids: Mapping[str, Any] | None,
            mm_processor_kwargs: Mapping[str, Any] | None,
            media_io_kwargs: Mapping[str, Any] | None = None,
            *,
            skip_mm_cache: bool = False,
        ) -> Any:
            rendered = original(
                prompt,
                mm_data,
                mm_uuids,
                mm_processor_kwargs,
                media_io_kwargs,
                skip_mm_cache=skip_mm_cache,
            )
            for modality, media in mm_data.items():
                hashes = rendered["mm_hashes"].get(modality, [])
                self._keep(modality, media, hashes, mm_processor_kwargs, media_io_kwargs)
            return rendered

        renderer._process_multimodal = recorded
        renderer._process_multimodal_async = make_async(recorded, executor=renderer._mm_executor)

    def get(self, mm_hash: MmHash) -> MediaSource | None:
        """The medium of that hash, None if it came without encoded bytes or long ago."""
        return self._sources.get(mm_hash)

    def _keep(
        self,
        modality: str,
        media: Any,
        hashes: Sequence[str],
        mm_processor_kwargs: Mapping[str, Any] | None,
        media_io_kwargs: Mapping[str, Any] | None,
    ) -> None:
        """On the renderer's one processing thread; :meth:`get` only reads."""
        each = media if isinstance(media, list) else [media]
        for medium, mm_hash in zip(each, hashes, strict=False):
            if not isinstance(medium, MediaWithBytes):
                continue
            source = MediaSource(
                modality,
                medium.original_bytes,
                dict(mm_processor_kwargs or {}),
                dict(media_io_kwargs or {}),
            )
            previous = self._sources.pop(MmHash(mm_hash), None)
            self._bytes += len(source.encoded) - (len(previous.encoded) if previous else 0)
            self._sources[MmHash(mm_hash)] = source
        while self._bytes > BUDGET_BYTES and len(self._sources) > 1:
            _, oldest = self._sources.popitem(last=False)
            self._bytes -= len(oldest.encoded)
