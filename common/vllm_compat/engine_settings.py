"""Card settings read from vLLM's configuration. Workers fill their cards with them. A frontend also
reads its own configuration, made from a card, and compares the two."""

import dataclasses
import os
from collections.abc import Sequence

from pydantic import JsonValue
from vllm import AsyncEngineArgs, envs
from vllm.config import ModelConfig, MultiModalConfig, PoolerConfig, VllmConfig

from common.request_plane.card import (
    EngineSettings,
    EnvironmentSettings,
    ModelSettings,
    OutputSettings,
    PrefixReuse,
)


def model_settings(model: ModelConfig) -> ModelSettings:
    """Return settings that decide tokens and media hashes; text models have media defaults."""
    media = model.multimodal_config or MultiModalConfig()
    return ModelSettings(
        model=model.model,
        runner=model.runner_type,
        convert=model.convert_type,
        model_impl=model.model_impl,
        model_class_overrides=dict(model.model_class_overrides),
        hf_config_path=model.hf_config_path,
        tokenizer=model.tokenizer,
        tokenizer_mode=model.tokenizer_mode,
        revision=model.revision,
        tokenizer_revision=model.tokenizer_revision,
        code_revision=model.code_revision,
        trust_remote_code=model.trust_remote_code,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        skip_tokenizer_init=model.skip_tokenizer_init,
        hf_overrides=dict(model.hf_overrides),
        config_format=str(model.config_format),
        generation_config=model.generation_config,
        override_generation_config=dict(model.override_generation_config),
        max_logprobs=model.max_logprobs,
        logprobs_mode=model.logprobs_mode,
        return_sampling_mask=model.return_sampling_mask,
        enable_trace_replay=model.enable_trace_replay,
        language_model_only=media.language_model_only,
        limit_mm_per_prompt={
            modality: {
                name: value
                for name, value in dataclasses.asdict(options).items()
                if value is not None
            }
            for modality, options in media.limit_per_prompt.items()
        },
        mm_processor_kwargs=media.mm_processor_kwargs,
        media_io_kwargs=dict(media.media_io_kwargs),
        mm_hasher_algorithm=media.mm_hasher_algorithm,
        mm_device_do_normalize=bool(media.mm_device_do_normalize),
        video_pruning_rate=media.video_pruning_rate or None,
        video_pruning_method=media.video_pruning_method,
        interleave_mm_strings=media.interleave_mm_strings,
        enable_mm_embeds=media.enable_mm_embeds,
        enable_prompt_embeds=model.enable_prompt_embeds,
        pooler_config=_pooler(model.pooler_config),
    )


_NOT_POOLING = {
    "pooling_type",  # implied by two other fields, and vLLM takes either
    "enable_flash_late_interaction",  # of the engine's kernel
}


def _pooler(config: PoolerConfig | None) -> dict[str, JsonValue] | None:
    """Return the resolved pooling; None for models that generate."""
    if config is None:
        return None
    fields: dict[str, JsonValue] = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if name not in _NOT_POOLING}


def output_settings(config: VllmConfig) -> OutputSettings:
    structure, reasoning = config.structured_outputs_config, config.reasoning_config
    return OutputSettings(
        backend=structure.backend,
        disable_any_whitespace=structure.disable_any_whitespace,
        disable_additional_properties=structure.disable_additional_properties,
        enable_in_reasoning=structure.enable_in_reasoning,
        reasoning_parser=structure.reasoning_parser,
        reasoning_start_str=reasoning.reasoning_start_str if reasoning else "",
        reasoning_end_str=reasoning.reasoning_end_str if reasoning else "",
    )


def environment_settings() -> EnvironmentSettings:
    return EnvironmentSettings(video_loader_backend=envs.VLLM_VIDEO_LOADER_BACKEND)


def apply_environment(settings: EnvironmentSettings) -> None:
    """Set variables of this process, which vLLM reads whenever it needs them."""
    os.environ.update(
        VLLM_VIDEO_LOADER_BACKEND=settings.video_loader_backend,
        VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",  # the worker has allowed it, or has none
        VLLM_CPU_KVCACHE_SPACE="0",  # no KV cache here, so no warning about its size
    )


def engine_settings(args: AsyncEngineArgs) -> EngineSettings:
    processors: Sequence[str | type] = args.logits_processors or []
    return EngineSettings(
        quantization=args.quantization,
        logits_processors=[
            each if isinstance(each, str) else f"{each.__module__}:{each.__qualname__}"
            for each in processors
        ],
    )


def prefix_reuse(config: VllmConfig) -> PrefixReuse:
    drafting = config.speculative_config
    return PrefixReuse(
        drops_last_block=drafting is not None and drafting.use_eagle_block_drop(),
        # With MTP only the last layer's group drops, and hardly any has a window. Otherwise vLLM
        # drops in all groups.
        drops_in_windows=drafting is not None and drafting.method != "mtp",
        keeps_tails=config.cache_config.prefix_cache_retention_interval is not None,
    )


def embeds_width(config: ModelConfig, modality: str) -> int:
    """Return the width of a medium's embeddings: the model's, and for pictures and films of Qwen 3
    once more for each deepstack layer."""
    width = config.get_inputs_embeds_size()
    if modality not in ("image", "video"):
        return width
    model = getattr(config.hf_config, "thinker_config", config.hf_config)
    layers = getattr(getattr(model, "vision_config", None), "deepstack_visual_indexes", None)
    return width * (1 + len(layers or ()))
