"""What a client's own name for a medium (``uuid``) means.

vLLM takes it for the medium's hash: while the medium is kept, the name alone is enough,
and whatever else comes under that name is not looked at. So it is here, in one frontend.
Workers serve many frontends, and two of those may have seen different media under one
name; an engine that holds one of them must not take it for the other. They therefore know
a named medium by what it is.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from blake3 import blake3
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.renderers import BaseRenderer

Uuids = Mapping[str, Sequence[str | None]]


def name_by_content(renderer: BaseRenderer) -> None:
    """Make a renderer give media with a uuid hashes of their content, from now on.

    To be called when nothing else will replace the renderer's media processing.
    """
    original = renderer._process_multimodal_async
    algorithm = renderer.model_config.get_multimodal_config().mm_hasher_algorithm

    async def named(
        prompt: list[int],
        mm_data: Mapping[str, Any],
        mm_uuids: Uuids | None,
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        rendered = await original(
            prompt,
            mm_data,
            own_names(mm_uuids),
            mm_processor_kwargs,
            media_io_kwargs,
            skip_mm_cache=skip_mm_cache,
        )
        if mm_uuids is not None and has_names(mm_uuids):
            await asyncio.to_thread(_rename, rendered, mm_uuids, algorithm)
        return rendered

    renderer._process_multimodal_async = named


def has_names(mm_uuids: Uuids | None) -> bool:
    """Whether any medium of a request has a uuid."""
    return any(uuid is not None for uuids in (mm_uuids or {}).values() for uuid in uuids)


def own_names(mm_uuids: Uuids | None) -> Uuids | None:
    """The uuids as vLLM's cache gets them: none is another modality's, or looks like the
    hash of a medium without one."""
    if mm_uuids is None or not has_names(mm_uuids):
        return mm_uuids
    return {
        modality: [None if uuid is None else _own_name(modality, uuid) for uuid in uuids]
        for modality, uuids in mm_uuids.items()
    }


def _own_name(modality: str, uuid: str) -> str:
    # JSON can carry lone surrogates.
    digest = blake3(f"{modality} {uuid}".encode(errors="surrogatepass")).hexdigest()
    return f"uuid-{digest}"


def _rename(rendered: Any, mm_uuids: Uuids, algorithm: str) -> None:
    for modality, uuids in mm_uuids.items():
        hashes, items = rendered["mm_hashes"].get(modality, []), rendered["mm_kwargs"][modality]
        rendered["mm_hashes"][modality] = [
            mm_hash if uuid is None else content_hash(modality, item, algorithm)
            for mm_hash, uuid, item in zip(hashes, uuids, items, strict=True)
        ]


def content_hash(modality: str, item: MultiModalKwargsItem, algorithm: str) -> str:
    """A hash of processed tensors, about 1 ms for 2 MB."""
    return str(
        MultiModalHasher.hash_kwargs(algorithm, modality=modality, processed=item.get_data())
    )
