"""A card for tests, with any field replaced."""

from typing import Any

from common.identity import Incarnation, WorkerId
from common.request_plane.card import (
    CacheSettings,
    Capacity,
    EngineSettings,
    EnvironmentSettings,
    HostIdentity,
    ModelSettings,
    OutputSettings,
    PrefixReuse,
    WorkerCard,
    WorkerState,
)


def make_card(
    worker_id: str = "w0",
    *,
    model: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    **changes: Any,
) -> WorkerCard:
    """A complete card; keywords replace fields of its sections."""
    return WorkerCard(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation("i0"),
        state=WorkerState.READY,
        vllm_version="0.32.0",
        served_model_names=["demo"],
        supported_tasks=["generate"],
        model=ModelSettings(
            model="/models/demo",
            runner="generate",
            convert="none",
            model_impl="auto",
            model_class_overrides={},
            hf_config_path=None,
            tokenizer=None,
            tokenizer_mode="auto",
            revision=None,
            tokenizer_revision=None,
            code_revision=None,
            trust_remote_code=False,
            dtype="float32",
            max_model_len=4096,
            skip_tokenizer_init=False,
            hf_overrides={},
            config_format="auto",
            generation_config="auto",
            override_generation_config={},
            max_logprobs=20,
            logprobs_mode="raw_logprobs",
            return_sampling_mask=False,
            enable_trace_replay=False,
            language_model_only=False,
            limit_mm_per_prompt={"image": {"count": 4}},
            mm_processor_kwargs=None,
            media_io_kwargs={},
            mm_hasher_algorithm="blake3",
            mm_device_do_normalize=True,
            video_pruning_rate=None,
            video_pruning_method="evs",
            interleave_mm_strings=False,
            enable_mm_embeds=False,
            enable_prompt_embeds=False,
            pooler_config=None,
        ).model_copy(update=model or {}),
        output=OutputSettings(
            backend="auto",
            disable_any_whitespace=False,
            disable_additional_properties=False,
            enable_in_reasoning=False,
            reasoning_parser="",
            reasoning_start_str="",
            reasoning_end_str="",
        ).model_copy(update=output or {}),
        environment=EnvironmentSettings(video_loader_backend="opencv"),
        engine=EngineSettings(quantization=None, logits_processors=[]),
        cache=CacheSettings(
            block_size=32,
            hash_algorithm="sha256_cbor",
            none_hash="00" * 32,
            enable_prefix_caching=True,
        ).model_copy(update=cache or {}),
        reuse=PrefixReuse(drops_last_block=False, drops_in_windows=False, keeps_tails=True),
        capacity=Capacity(
            num_blocks=100, max_num_seqs=8, max_num_batched_tokens=2048, encoder_cache_tokens=2048
        ),
        ranks=[0],
        request_endpoint="tcp://127.0.0.1:1",
        kv_event_sources=[],
        host=HostIdentity(hostname="here", pid=1),
    ).model_copy(update=changes)
