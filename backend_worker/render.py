"""Processing a medium in the worker, for when transfer is turned off.

Uses the engine's own renderer with its processor-only cache, on the renderer's own
thread; an injected item's cache is never touched.
"""

import base64
from typing import Any

from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.media import MediaConnector
from vllm.renderers import BaseRenderer
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.transformers_utils.processor import get_video_processor_cls_name

from common.errors import CorruptSegmentError
from common.identity import MmHash
from common.transfer.reference import MediaSource


class LocalRenderer:
    """Turns an encoded medium into tensors."""

    def __init__(self, renderer: BaseRenderer) -> None:
        self._renderer = renderer

    async def render(self, source: MediaSource) -> tuple[MmHash, MultiModalKwargsItem]:
        """Decode and process one medium.

        Raises:
            CorruptSegmentError: it can't be decoded or processed here, though the
                frontend could.
        """
        renderer = self._renderer
        connector = MediaConnector(media_io_kwargs=source.media_io_kwargs)
        url = "data:application/octet-stream;base64," + base64.b64encode(source.encoded).decode()
        try:
            medium: Any
            match source.modality:
                case "image":
                    medium = await connector.fetch_image_async(url)
                case "video":
                    # Some models have frames chosen in a way of their own.
                    chooser = get_video_processor_cls_name(renderer.model_config)
                    medium = await connector.fetch_video_async(url, video_processor=chooser)
                case "audio":
                    medium = await connector.fetch_audio_async(url)
                case other:
                    raise CorruptSegmentError(f"{other} can't be processed from its encoded form")
            text = renderer.get_mm_processor().dummy_inputs.get_dummy_text({source.modality: 1})
            prompt = parse_model_prompt(
                renderer.model_config,
                {
                    "prompt": text,
                    "multi_modal_data": {source.modality: [medium]},
                    "mm_processor_kwargs": source.mm_processor_kwargs,
                    "media_io_kwargs": source.media_io_kwargs,
                },
            )
            (rendered,) = await renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        except (ValueError, OSError, RuntimeError) as error:
            raise CorruptSegmentError(
                f"the worker can't process the {source.modality}: {error}"
            ) from error
        (item,) = rendered["mm_kwargs"][source.modality]
        (mm_hash,) = rendered["mm_hashes"][source.modality]
        return MmHash(mm_hash), item
