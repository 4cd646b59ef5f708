"""Process a medium in the worker, for when transfer is turned off.

Uses the engine's own renderer with its processor-only cache, on the renderer's own thread, and
never touches the cache of injected items. That cache too is partitioned by ``cache_salt``: vLLM
passes the name of each medium to the hash function, and its partition is that name.
"""

import asyncio
import base64
import dataclasses
from inspect import signature
from typing import Any

from PIL import Image
from vllm.exceptions import VLLMClientError
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.processing import BaseMultiModalProcessor, ProcessorInputs
from vllm.renderers import BaseRenderer
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.transformers_utils.processor import get_video_processor_cls_name

from common.errors import CorruptSegmentError
from common.identity import MmHash
from common.media.cache_partition import Partition, hash_within
from common.media.decoder_guard import guard_decoders
from common.media.formats import is_known_container
from common.transfer.base import MediaSource
from common.vllm_compat.renderer_patches import ByContent


class LocalRenderer:
    """Render an encoded medium to tensors."""

    def __init__(self, renderer: BaseRenderer) -> None:
        """Take a renderer that hashes media by :func:`partitioned_hashes`."""
        guard_decoders()
        self._renderer = renderer

    async def render(self, source: MediaSource) -> tuple[MmHash, MultiModalKwargsItem]:
        """Decode and process one medium; return its hash within its partition, and its tensors.
        Raises CorruptSegmentError: it can't be processed here, though the frontend could."""
        if source.modality != "image" and not is_known_container(source.encoded):
            raise CorruptSegmentError(
                f"the {source.modality} begins like none of the formats that are read"
            )
        renderer = self._renderer
        connector = MediaConnector(media_io_kwargs=source.media_io_kwargs)
        url = "data:application/octet-stream;base64," + base64.b64encode(source.encoded).decode()
        try:
            medium: object
            match source.modality:
                case "image":
                    medium = await connector.fetch_image_async(url)
                case "video":
                    # Some models select frames in their own way.
                    chooser = get_video_processor_cls_name(renderer.model_config)
                    medium = await connector.fetch_video_async(url, video_processor=chooser)
                case "audio":
                    medium = await connector.fetch_audio_async(url)
                case other:
                    raise CorruptSegmentError(f"{other} can't be processed from its encoded form")
            prompt = parse_model_prompt(
                renderer.model_config,
                {
                    **await _place_for(renderer.get_mm_processor(), source.modality, medium),
                    "multi_modal_data": {source.modality: [medium]},
                    "multi_modal_uuids": {source.modality: [source.partition]},
                    "mm_processor_kwargs": source.mm_processor_kwargs,
                    "media_io_kwargs": source.media_io_kwargs,
                },
            )
            (rendered,) = await renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        except (
            ImportError,  # of a package that the frontend has, a resampler for example
            ValueError,
            OSError,
            RuntimeError,
            VLLMClientError,
            Image.DecompressionBombError,
        ) as error:  # of limits, too, which may be lower here than in the frontend
            raise CorruptSegmentError(
                f"the worker can't process the {source.modality}: {error}"
            ) from error
        (item,) = rendered["mm_kwargs"][source.modality]
        (mm_hash,) = rendered["mm_hashes"][source.modality]
        return MmHash(mm_hash), item


async def _place_for(
    processor: BaseMultiModalProcessor[Any], modality: str, medium: object
) -> dict[str, str | list[int]]:
    """Return a prompt that contains one medium, as vLLM takes it.

    Three cases: most processors place the medium's tokens where a text names it. Processors of
    Mistral's own format expect the tokens of its tokenizer, which depend on the medium. The others
    have no text and write the tokens themselves.
    """
    counts = {modality: 1}
    takes = signature(processor.get_dummy_inputs).parameters
    shown = {"mm_data": {modality: [medium]}} if "mm_data" in takes else {}
    if not shown:
        text = processor.dummy_inputs.get_dummy_text(counts)
        if text or type(processor).get_dummy_inputs is BaseMultiModalProcessor.get_dummy_inputs:
            return {"prompt": text}
    written = await asyncio.to_thread(processor.get_dummy_inputs, 0, counts, {}, **shown)
    return {"prompt_token_ids": list(written.prompt)}


def partitioned_hashes(by_content: ByContent, inputs: ProcessorInputs) -> dict[str, list[MmHash]]:
    """Hash media by content, within the partition that their name stands for."""
    found = by_content(dataclasses.replace(inputs, mm_uuid_items=None))
    partitions = inputs.mm_uuid_items or {}
    return {
        modality: [
            hash_within(mm_hash, Partition(partition or ""))
            for mm_hash, partition in zip(
                mm_hashes, partitions.get(modality) or [None] * len(mm_hashes), strict=True
            )
        ]
        for modality, mm_hashes in found.items()
    }
