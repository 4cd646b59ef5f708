"""Step 1 of a request, and the one file that touches vLLM's renderer.

Builds vLLM's renderer and input processor from a card on a machine without a GPU,
and turns a rendered prompt into what the later steps work on. The renderer itself
runs inside vLLM's serving code, on its own thread pool.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm import AsyncEngineArgs, envs
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache.base import MultiModalCache
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from common.card import WorkerCard
from common.errors import ConfigurationError
from common.hf_processor_runs import HfProcessorRuns
from common.identity import MmHash, MmIdentifier
from common.protocol import MediaPart
from common.transfer.reference import MediaSource
from frontend.media_sources import MediaSources


@dataclass(frozen=True)
class MediaItem:
    """One media item of a prompt, processed.

    Attributes:
        part: its place in the prompt.
        identifier: its name in block hashes.
        num_embeds: embeddings its encoder produces, the cost of encoding it.
        nbytes: size of its tensors.
        source: the medium before processing, if it is kept.
        item: the tensors. Shared with the processor cache: never changed.
    """

    part: MediaPart
    identifier: MmIdentifier
    num_embeds: int
    nbytes: int
    item: MultiModalKwargsItem
    source: MediaSource | None = None


@dataclass(frozen=True)
class ProcessedPrompt:
    """A prompt as every later step needs it. Media are sorted by position."""

    token_ids: list[int]
    media: list[MediaItem]
    prompt_text: str | None
    cache_salt: str | None
    lora_request: LoRARequest | None
    prompt_embeds: torch.Tensor | None
    prompt_is_token_ids: list[bool] | None

    def items(self) -> Mapping[MmHash, MediaItem]:
        """The distinct media items by hash: an image shown twice is one item."""
        return {media.part.mm_hash: media for media in self.media}


class Preprocessor:
    """vLLM's renderer and input processor for one card."""

    def __init__(
        self, card: WorkerCard, serve_args: Namespace, *, keep_sources: bool = False
    ) -> None:
        """Load tokenizer and processor. Takes seconds: not on the event loop.

        Args:
            card: the fleet's contract.
            serve_args: vLLM's own API server arguments; model arguments in it are
                replaced by the card's.
            keep_sources: keep media as fetched beside their tensors, for workers that
                process them themselves.

        Raises:
            ConfigurationError: the model's files can't be read here, or the model
                is of a kind that can't be routed.
        """
        for name, value in card.model.model_dump().items():
            setattr(serve_args, name, value)
        if serve_args.served_model_name is None:
            serve_args.served_model_name = card.served_model_names
        self.vllm_config = _gpu_less_config(card, AsyncEngineArgs.from_cli_args(serve_args))
        if self.model_config.is_encoder_decoder:
            raise ConfigurationError(f"{card.model.model} is an encoder-decoder model: not routed")
        self.renderer: BaseRenderer = renderer_from_config(self.vllm_config)
        # One cache for /tokenize and for requests, instead of two of the same kind.
        if self.renderer._mm_processor_only_cache is not None:
            self.renderer._mm_processor_only_cache.close()
            self.renderer._mm_processor_only_cache = self.renderer._mm_processor_cache
        self._sources = MediaSources(self.renderer) if keep_sources else None
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.tasks: tuple[SupportedTask, ...] = tuple(card.supported_tasks)

    @property
    def model_config(self) -> ModelConfig:
        """vLLM's configuration of the model."""
        return self.vllm_config.model_config

    def count_hf_runs(self) -> HfProcessorRuns:
        """Count HF processor runs from now on, so that warm-up is left out."""
        return HfProcessorRuns(self.renderer, side="frontend", worker_id=None)

    async def process(
        self,
        prompt: EngineInput,
        params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None,
    ) -> ProcessedPrompt:
        """Validate a rendered prompt and sort its media by position.

        Runs on the renderer's pool. Raises what vLLM's ``process_inputs`` raises,
        which vLLM's server turns into a 4xx.
        """
        request: EngineCoreRequest = await self.input_processor.process_inputs_async(
            request_id, prompt, params, self.tasks, lora_request=lora_request
        )
        text = prompt.get("prompt") if isinstance(prompt, dict) else None
        return ProcessedPrompt(
            token_ids=request.prompt_token_ids or [],
            media=[self._media_item(feature) for feature in request.mm_features or []],
            prompt_text=text if isinstance(text, str) else None,
            cache_salt=request.cache_salt,
            lora_request=request.lora_request,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
        )

    def _media_item(self, feature: MultiModalFeatureSpec) -> MediaItem:
        assert feature.mm_hash is not None and feature.data is not None  # processor-only cache
        position = feature.mm_position
        mask = position.is_embed
        return MediaItem(
            part=MediaPart(
                modality=feature.modality,
                mm_hash=MmHash(feature.mm_hash),
                offset=position.offset,
                length=position.length,
                is_embed=None if mask is None else mask.to(torch.uint8).numpy().tobytes(),
            ),
            identifier=MmIdentifier(feature.identifier),
            num_embeds=position.get_num_embeds(),
            nbytes=MultiModalCache.get_item_size(feature.data),
            item=feature.data,
            source=self._sources.get(MmHash(feature.mm_hash)) if self._sources else None,
        )

    def close(self) -> None:
        """Stop the renderer's threads."""
        self.renderer.shutdown()


def _gpu_less_config(card: WorkerCard, args: AsyncEngineArgs) -> VllmConfig:
    """vLLM's configuration without a device, the way its GPU-less renderer makes it."""
    try:
        model_config = args.create_model_config()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"worker {card.worker_id} serves {card.model.model}, "
            f"whose configuration can't be read on this machine: {error}"
        ) from error
    model_config.quantization = None  # no weights here, so nothing to validate it against
    envs.VLLM_CPU_KVCACHE_SPACE = 0  # no KV cache here, so no warning about its size
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(enable_prefix_caching=card.cache.enable_prefix_caching),
        scheduler_config=SchedulerConfig.default_factory(
            max_model_len=model_config.max_model_len,
            max_num_batched_tokens=card.capacity.max_num_batched_tokens,
            max_num_seqs=card.capacity.max_num_seqs,
        ),
        logging_config=args.create_logging_config(),
        structured_outputs_config=args.create_structured_outputs_config(),
    )
    # Selects the cache that keeps tensors: with a single API process vLLM assumes
    # that an engine next to it keeps them, and returns None for a repeated image.
    config.parallel_config._api_process_count = 2
    return config
