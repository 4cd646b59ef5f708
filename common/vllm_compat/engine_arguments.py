"""Every engine argument of vLLM in one place each: how frontends learn it, or why they need not.

A worker takes all of them. Arguments that change tokens, media, hashes or the handling of answers
must agree in the frontend, or answers are silently wrong. So a new argument of a newer vLLM fails a
test until it is classified.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from vllm import AsyncEngineArgs
from vllm.config import VllmConfig

from common.errors import ConfigurationError
from common.request_plane.card import ModelSettings

HOST_MEMORY: Final = "ECCPUConnector"  # the one connector of encodings that a worker may have

ON_CARD: Mapping[str, str] = MappingProxyType(
    {name: f"model.{name}" for name in ModelSettings.model_fields}
    | {
        "served_model_name": "served_model_names",
        "mm_processor_device": "model.mm_processor_kwargs",  # where vLLM puts it
        "structured_outputs_config": "output",
        "reasoning_parser": "output.reasoning_parser",
        "reasoning_config": "output.reasoning_end_str",
        "logits_processors": "engine.logits_processors",
        "quantization": "engine.quantization",
        "block_size": "cache.block_size",
        "decode_context_parallel_size": "cache.block_size",
        "enable_prefix_caching": "cache.enable_prefix_caching",
        "prefix_caching_hash_algo": "cache.hash_algorithm",
        "speculative_config": "reuse.drops_last_block",
        "spec_method": "reuse.drops_last_block",
        "spec_model": "reuse.drops_last_block",
        "spec_tokens": "reuse.drops_last_block",
        "prefix_cache_retention_interval": "reuse.keeps_tails",
        "max_num_seqs": "capacity.max_num_seqs",
        "max_num_batched_tokens": "capacity.max_num_batched_tokens",
        "ec_transfer_config": "capacity.encoder_cache_tokens",
        "data_parallel_size": "ranks",
        "kv_events_config": "kv_event_sources",
    }
)
"""Arguments that are on the card, with the field there. Values are those that vLLM resolved."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "watermark_config": "frontends prepare requests without it, so that answers would bear "
        "no watermark, and its secret key is not for cards",
        "default_mm_loras": "vLLM's server chooses adapters by a request's media, and frontends "
        "by name alone, so that answers would come from the plain model",
        "enable_tower_connector_lora": "what an encoder makes of media would be another for each "
        "adapter, and frontends name media by their content alone",
        "mm_encoder_only": "there would be no language model to answer",
        "reasoning_parser_plugin": "frontends load no plug-ins",
        "io_processor_plugin": "frontends load no plug-ins",
        "data_parallel_multi_port_external_lb": "it is for `vllm serve`, which starts a server for "
        "each rank; start a worker for each, with --data-parallel-rank",
        "tokens_only": "frontends need the text of answers",
    }
)
"""Arguments that a frontend can't follow, and why. Workers start without them only."""

_OF_EACH_SIDE = "each side has its own; the frontend's comes from its command line"
_MEDIA_ARRIVE = "frontends fetch and process media; workers get tensors"
_COMPUTING = "how the engine computes, which no frontend does"
_PLACEMENT = "the devices and processes of the engine"
_LOADING = "how the engine gets its weights, of which frontends have none"
_CACHING = "how the engine keeps its KV cache; events tell what is in it, and the card the sizes"
_SCHEDULING = "the engine's own queue; the worker says how long it is"
_ADAPTERS = "how the engine keeps its adapters; which it has stands on the card"
_CHECKED = "workers check it themselves, and refuse the request"
_TELEMETRY = "what the worker logs and measures"
_HOP = "how tensors get from the worker to its engine"
_SLEEPING = "for whoever runs a single engine"

_REASONS: Mapping[str, str] = {
    _OF_EACH_SIDE: """
        hf_token download_dir renderer_num_workers shutdown_timeout
        fail_on_environ_validation mm_processor_cache_gb
    """,
    _MEDIA_ARRIVE: "allowed_local_media_path allowed_media_domains",
    _COMPUTING: """
        seed enforce_eager use_fp64_gumbel cudagraph_capture_sizes max_cudagraph_capture_size
        ir_op_priority moe_backend linear_backend sparse_indexer_topk_backend
        quantization_config allow_deprecated_quantization
        disable_sliding_window disable_cascade_attn mm_encoder_tp_mode mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin skip_mm_profiling mm_ipc_gpu_memory_gb
        compilation_config attention_config attention_backend engram_config mamba_config
        mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds replayssm_buffer_len use_replayssm kernel_config
        enable_flashinfer_autotune additional_config optimization_level performance_mode
        gdn_prefill_backend kda_prefill_backend kda_decode_backend
        enable_return_routed_experts aux_output_config monokernel
    """,
    _PLACEMENT: """
        distributed_executor_backend pipeline_parallel_size master_addr master_port nnodes
        node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind
        numa_bind_nodes numa_bind_cpus device_ids tensor_parallel_size
        prefill_context_parallel_size dcp_comm_backend dcp_q_replicate
        dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_rank
        data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_backend enable_hc_sp
        enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter
        all2all_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size
        dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold
        disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy
        _api_process_count _api_process_rank max_parallel_loading_workers
        disable_custom_all_reduce enable_shm_tensor_arena ray_workers_use_nsight worker_cls
        worker_extension_cls fault_tolerance_config enable_fault_tolerance
    """,
    _LOADING: """
        model_weights safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size load_format offload_backend cpu_offload_gb
        cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step
        offload_params model_loader_extra_config ignore_patterns use_tqdm_on_load
        pt_load_map_location weight_transfer_config
    """,
    _CACHING: """
        kv_cache_dtype gpu_memory_utilization
        kv_cache_memory_bytes num_gpu_blocks_override disable_hybrid_kv_cache_manager
        kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size
        prefix_match_unit mamba_cache_mode enable_mamba_shared_prefix_checkpoint
        kv_sharing_fast_prefill swa_bounded_replay kv_offloading_size kv_offloading_backend
        kv_transfer_config ec_manager_config
    """,
    _SCHEDULING: """
        max_num_scheduled_tokens long_prefill_token_threshold
        long_prefill_token_threshold_adaptive max_num_active_seqs max_num_queued_reqs
        max_num_queued_tokens enable_chunked_prefill disable_chunked_mm_input
        scheduler_reserve_full_isl prefill_schedule_interval watermark scheduling_policy
        scheduler_cls async_scheduling stream_interval
    """,
    _ADAPTERS: """
        enable_lora max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype
        lora_target_modules specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
    """,
    _CHECKED: "diffusion_config",
    _TELEMETRY: """
        disable_log_stats aggregate_engine_logging show_hidden_metrics_for_version
        otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
        kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics
        enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details
        jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats profiler_config
        logging_config log_level log_config_file enable_log_requests
    """,
    _HOP: "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc",
    _SLEEPING: """
        enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names
        enable_cumem_allocator enable_nccl_comm_suspend sleep_mode_backend watchdog_config
    """,
}

IRRELEVANT: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, names in _REASONS.items() for name in names.split()}
)
"""Arguments that are irrelevant to a frontend, because …"""

IDLE: Mapping[str, str] = MappingProxyType(
    {"aggregate_engine_logging": "workers write no statistics on the log"}
)
"""Arguments without effect in a worker."""


def check_arguments(args: AsyncEngineArgs) -> None:
    """Raise ConfigurationError for arguments that a frontend couldn't follow."""
    for name, reason in REFUSED.items():
        # This plug-in has two names.
        if getattr(args, name) or getattr(args.structured_outputs_config, name, None):
            raise _refusal(name, reason)
    if getattr(args.structured_outputs_config, "backend", None) == "lm-format-enforcer":
        raise _refusal(
            "structured_outputs_config",
            "nothing bounds what lm-format-enforcer takes of an engine for a structure of a "
            'client\'s; set its "backend" to auto, xgrammar, guidance or outlines',
        )
    if callable(args.hf_overrides):
        raise _refusal("hf_overrides", "a function can't be put on a card")


def check_configuration(config: VllmConfig) -> None:
    """Raise ConfigurationError for a resolved configuration that a frontend couldn't follow."""
    _check_connector(config)
    media = config.model_config.multimodal_config
    if media is None:
        return
    if media.get_mm_processor_device_type() not in (None, "cpu"):
        raise _refusal("mm_processor_device", "frontends process media, and they have no GPU")
    if media.use_gpu_video_backend():
        raise _refusal(
            "media_io_kwargs",
            "it (or VLLM_VIDEO_LOADER_BACKEND) has videos decoded on a GPU, and frontends, which "
            "decode them, have none",
        )


def _check_connector(config: VllmConfig) -> None:
    connector = config.ec_transfer_config
    if connector is None:
        return
    if connector.ec_role != "ec_both" or connector.ec_connector_extra_config.get("ec_enable_nixl"):
        raise _refusal(
            "ec_transfer_config",
            "frontends know no split into encoding and answering, so its ec_role has to be ec_both "
            "and ec_enable_nixl off",
        )
    if connector.ec_connector != HOST_MEMORY:
        raise _refusal(
            "ec_transfer_config",
            f"what {connector.ec_connector} keeps may outlive the worker, and so the weights that "
            f"it was made with; {HOST_MEMORY} keeps it in the host's memory",
        )


def _refusal(name: str, reason: str) -> ConfigurationError:
    flag = "--" + name.replace("_", "-")
    return ConfigurationError(f"{flag} is not for a worker of a fleet: {reason}")
