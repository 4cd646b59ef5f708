"""Step 1 of a request: rendering.

Builds vLLM's renderer and input processor from a card without a GPU, and turns a rendered prompt
into the input of later steps. The renderer itself runs in vLLM's serving code, on its own thread
pool.
"""

import asyncio
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from vllm.config import ModelConfig
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache.base import MultiModalCache
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from vllm.pooling_params import PoolingParams
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.hf import HfRenderer
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.tokenizers import TokenizerLike
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine import EngineCoreRequest

from common.aio.cleanup import undo_on_error
from common.aio.watched_threads import WatchedThreads
from common.errors import RequestRejectedError
from common.identity import MmHash, MmIdentifier
from common.lru import Lru
from common.media.cache_partition import hash_within
from common.observability.log_lines import log_setup
from common.request_plane.card import WorkerCard
from common.request_plane.protocol import MediaPart, drop_transfer_params, names_encoder
from common.transfer.arena import ArenaAccess
from common.transfer.base import MediaSource
from common.vllm_compat.engine_settings import embeds_width
from common.vllm_compat.renderer_patches import (
    HfProcessorRuns,
    replace_template,
    replace_threads,
    replace_tokenizing,
)
from common.vllm_compat.structures_once import ReadingOnce
from frontend.fetch import MediaLoader
from frontend.processing.backends import Backend, OwnBackend, ProcessPool
from frontend.processing.child_messages import StartUp
from frontend.processing.client_templates import ClientTemplates, take_templates
from frontend.processing.client_tensors import are_embeds, check_embeds, content_hash
from frontend.processing.media_processing import MediaProcessing, MediaSources
from frontend.processing.mrope import MropePositions
from frontend.processing.renderer import build_config
from frontend.processing.settings import PreprocessSettings
from frontend.processing.store import ArenaStore, PrivateStore, ProcessedStore
from frontend.processing.structures import StructureTrials
from frontend.processing.tokenizing import Tokenizing
from frontend.request_context import current_partition, salt_of_blocks

SOURCES_BYTES: Final = 1 << 30
"""Encoded media kept. A request whose source was evicted is served inline."""


@dataclass(frozen=True)
class MediaItem:
    """One processed media item of a prompt.

    Attributes:
        identifier: its name in block hashes.
        num_embeds: embeddings from its encoder, the cost of encoding it.
        nbytes: size of its tensors.
        source: the medium before processing, if kept.
        item: the tensors. Shared with the processor cache: never changed.
        by_client: whether a client sent the tensors or embeddings, or chose how they are made.
    """

    part: MediaPart
    identifier: MmIdentifier
    num_embeds: int
    nbytes: int
    item: MultiModalKwargsItem
    source: MediaSource | None = None
    by_client: bool = False


@dataclass(frozen=True)
class ProcessedPrompt:
    """A prompt as later steps need it. Media are sorted by position.

    Attributes:
        token_ids: zeros, one per row, for a prompt of embeddings alone, as in vLLM's answers.
        prompt_embeds: a row for each token, if the prompt has embeddings.
        prompt_is_token_ids: marks plain tokens among embeddings.
    """

    token_ids: list[int]
    media: list[MediaItem]
    prompt_text: str | None
    cache_salt: str | None
    lora_request: LoRARequest | None
    prompt_embeds: torch.Tensor | None
    prompt_is_token_ids: list[bool] | None

    @property
    def tokens_sent(self) -> list[int] | None:
        """Tokens for the engine; None for a prompt of embeddings alone."""
        alone = self.prompt_embeds is not None and self.prompt_is_token_ids is None
        return None if alone else self.token_ids

    @property
    def has_client_tensors(self) -> bool:
        """Whether a client influenced tensors, which may end an engine."""
        return self.prompt_embeds is not None or any(media.by_client for media in self.media)

    def items(self) -> Mapping[MmHash, MediaItem]:
        """Return the distinct media items by hash: an image shown twice is one item."""
        return {media.part.mm_hash: media for media in self.media}


class Preprocessor:
    """vLLM's renderer and input processor for one card."""

    def __init__(
        self,
        card: WorkerCard,
        serve_args: Namespace,
        *,
        loader: MediaLoader,
        arena: ArenaAccess | None,
        settings: PreprocessSettings,
        keep_sources: bool = False,
    ) -> None:
        """Load tokenizer and processor. Takes seconds: not on the event loop.

        Args:
            serve_args: vLLM's API server arguments; the card replaces model arguments.
            arena: keeps processed media; without it they are kept in private memory.
            keep_sources: keep media as fetched too, for workers that process them themselves.

        Raises:
            ConfigurationError: the model's files can't be read here, or the processes don't start.
        """
        self.card = card
        self.vllm_config = build_config(card, serve_args)
        self.renderer: BaseRenderer = renderer_from_config(self.vllm_config)
        self.tasks: tuple[SupportedTask, ...] = tuple(card.supported_tasks)
        self.hf_runs = HfProcessorRuns(side="frontend", worker_id=None)
        self._sources: MediaSources | None = None
        if keep_sources:
            self._sources = Lru(SOURCES_BYTES, lambda source: len(source.encoded))
        self._pool: ProcessPool | None = None
        self._processing: MediaProcessing | None = None
        self._takes_embeds = card.model.enable_mm_embeds
        limit_s = loader.policy.decode_timeout_s
        self._thread, self._long_thread = (
            WatchedThreads("processor", 1, limit_s) for _ in range(2)
        )
        self._media_threads = loader.pool
        self._templates: ClientTemplates | None = None
        self._positions = MropePositions(self.model_config)
        with undo_on_error(self.renderer.shutdown):
            texts = partial(
                WatchedThreads, "tokenizer", self.model_config.renderer_num_workers, limit_s
            )
            replace_threads(self.renderer, self._thread, texts)
            self.tokenizing = Tokenizing(self.renderer, limit_s)
            replace_tokenizing(self.renderer, self.tokenizing, self.tokenizing.decode)
            self.input_processor = ReadingOnce(self.vllm_config, self.renderer)
            self._structures = StructureTrials(self.vllm_config, self.renderer.tokenizer)
            if is_mistral_tokenizer(self.renderer.tokenizer):
                _take_over_mistral(self.renderer, self.tokenizing, loader)
            elif isinstance(self.renderer, HfRenderer):
                replace_template(self.renderer, self.tokenizing.apply_template)
            if self.renderer.mm_processor is not None:
                self._take_over_media(serve_args, loader, arena, settings)
            if serve_args.trust_request_chat_template:  # last: it starts a process
                default = load_chat_template(serve_args.chat_template)
                self._templates = take_templates(self.renderer, default)

    def _take_over_media(
        self,
        serve_args: Namespace,
        loader: MediaLoader,
        arena: ArenaAccess | None,
        settings: PreprocessSettings,
    ) -> None:
        store = _make_store(arena, self.model_config)
        backend: Backend
        if settings.workers:
            offer = arena.offer if arena else None
            order = StartUp(self.card, serve_args, loader.policy, offer, log_setup())
            backend = self._pool = ProcessPool(
                order, settings.workers, store, self.hf_runs, loader.budgets.decoding
            )
        else:
            backend = OwnBackend(
                self.renderer, store, loader.decode_once, self._long_thread, self.hf_runs
            )
        self._processing = MediaProcessing(
            self.renderer,
            store,
            backend,
            loader.decode,
            sources=self._sources,
        )
        self._processing.take_over(self.hf_runs)
        loader.defers = self._processing.defers

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    async def process(
        self,
        prompt: EngineInput,
        params: SamplingParams | PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None,
        engines: int = 1,
    ) -> ProcessedPrompt:
        """Validate a rendered prompt and sort its media by position, on the renderer's pool. The
        more ``engines``, the more of a client's slow structures run at once.

        Drops the client's transfer parameters. Raises errors of vLLM's that its server answers with
        a 4xx; RequestRejectedError for embeddings and media that would end an engine, or are only
        named; and ThreadStuckError if hashing the client's data takes too long.
        """
        prompt = await self._with_own_hashes(prompt, encoded=names_encoder(params))
        drop_transfer_params(params)
        await self._structures.check(params, engines)
        # Only workers know the adapters; the configuration here has none.
        request: EngineCoreRequest = await self.input_processor.process_inputs_async(
            request_id, prompt, params, self.tasks
        )
        if (
            request.prompt_embeds is not None
            and getattr(params, "prompt_logprobs", None) is not None
        ):
            # vLLM refuses it for completions only; a chat's may end an engine.
            raise RequestRejectedError("prompt_logprobs: not of a prompt with embeddings")
        tokens = _token_ids(request)
        self._positions.check(request.mm_features or (), tokens)
        text = _said_to_the_decoder(prompt).get("prompt")
        return ProcessedPrompt(
            token_ids=tokens,
            media=[self._media_item(feature) for feature in request.mm_features or []],
            prompt_text=text if isinstance(text, str) else None,
            cache_salt=request.cache_salt,
            lora_request=lora_request,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
        )

    async def _with_own_hashes(self, prompt: EngineInput, *, encoded: bool) -> EngineInput:
        """Replace media hashes that this frontend did not compute by content hashes: vLLM's
        token-in, token-out route (``--enable-scale-out``) takes hashes from clients.

        ``encoded`` if the client names another server as encoder: vLLM then accepts incomplete
        media.
        """
        if prompt["type"] == "enc_dec":
            decoder = await self._with_own_hashes(prompt["decoder_prompt"], encoded=encoded)
            return {**prompt, "decoder_prompt": decoder}
        salt = salt_of_blocks(prompt.get("cache_salt"))
        if salt != prompt.get("cache_salt"):
            prompt = {**prompt, "cache_salt": salt}
        if prompt["type"] != "multimodal":
            return prompt
        hashed = () if self._processing is None else self._processing.hashed
        algorithm = self.model_config.get_multimodal_config().mm_hasher_algorithm
        partition = current_partition()
        hashes: dict[str, list[str]] = {}
        for modality, items in prompt["mm_kwargs"].items():
            hashes[modality] = list(prompt["mm_hashes"][modality])
            for index, item in enumerate(items):
                if item is None:
                    raise RequestRejectedError(
                        f"{modality} {index + 1} is only named by a hash: send its data"
                    )
                if item not in hashed:
                    if encoded:
                        raise RequestRejectedError(
                            "ec_transfer_params: no other server encodes media for this one; send "
                            "their tensors"
                        )
                    found = await self._content_hash(modality, item, algorithm)
                    hashes[modality][index] = hash_within(found, partition)
        return {**prompt, "mm_hashes": hashes}

    async def _content_hash(
        self, modality: str, item: MultiModalKwargsItem, algorithm: str
    ) -> MmHash:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._media_threads, content_hash, modality, item, algorithm
        )

    def _media_item(self, feature: MultiModalFeatureSpec) -> MediaItem:
        assert feature.mm_hash is not None and feature.data is not None  # processor-only cache
        if self._takes_embeds:
            check_embeds(feature, embeds_width(self.model_config, feature.modality))
        position = feature.mm_position
        mask = position.is_embed
        part = MediaPart(
            modality=feature.modality,
            mm_hash=MmHash(feature.mm_hash),
            offset=position.offset,
            length=position.length,
            is_embed=None if mask is None else mask.to(torch.uint8).numpy().tobytes(),
        )
        return MediaItem(
            part=part,
            identifier=MmIdentifier(feature.identifier),
            num_embeds=position.get_num_embeds(),
            nbytes=MultiModalCache.get_item_size(feature.data),
            item=feature.data,
            source=self._sources.get(MmHash(feature.mm_hash)) if self._sources else None,
            by_client=are_embeds(feature.modality, feature.data)
            or self._processing is None
            or feature.data not in self._processing.hashed
            or feature.data in self._processing.by_options,
        )

    @property
    def defers(self) -> bool:
        """Whether media may be passed as :class:`frontend.fetch.DeferredMedium`."""
        return self._processing is not None and self._processing.defers

    @property
    def takes_text_only(self) -> bool:
        return self.renderer.mm_processor is None

    @property
    def tokenizer(self) -> TokenizerLike | None:
        return self.renderer.tokenizer

    @property
    def vocabulary_size(self) -> int:
        return self.model_config.get_vocab_size()

    def clear_media(self) -> None:
        """Process all media anew from now on."""
        if self._processing is not None:
            self._processing.clear()

    async def close(self) -> None:
        if self._processing is not None:
            await self._processing.close()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)
        if self._templates is not None:
            await asyncio.to_thread(self._templates.close)
        await asyncio.to_thread(self._structures.close)
        self.tokenizing.close()
        self.renderer.shutdown()
        for thread in (self._thread, self._long_thread):
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)


def _take_over_mistral(renderer: BaseRenderer, tokenizing: Tokenizing, loader: MediaLoader) -> None:
    # Imported here, since mistral_common takes a second, and most models do without.
    from frontend.processing.mistral_chat import MistralChat

    MistralChat(renderer, tokenizing, loader.decode, loader.pool).take_over()


def _said_to_the_decoder(prompt: EngineInput) -> EngineInput:
    """Return the part with vLLM's tokens and media. An encoder's tokens are for its checks."""
    return prompt["decoder_prompt"] if prompt["type"] == "enc_dec" else prompt


def _make_store(arena: ArenaAccess | None, model_config: ModelConfig) -> ProcessedStore:
    if arena is not None:
        return ArenaStore(arena)
    return PrivateStore(model_config.get_multimodal_config().mm_processor_cache_gb)


def _token_ids(request: EngineCoreRequest) -> list[int]:
    if request.prompt_token_ids is None and request.prompt_embeds is not None:
        return [0] * len(request.prompt_embeds)
    return request.prompt_token_ids or []
