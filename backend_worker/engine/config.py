"""Configuration of a worker's engine, and the data-parallel ranks that it serves.

The engine is configured as ``vllm serve`` configures its own for the same flags;
``tests/unit/backend_worker/test_engine_config.py`` lists the exceptions.

With internal balancing one AsyncLLM serves all ranks, with hybrid balancing the ranks of its node,
with external balancing one rank. Cards, KV events and the request plane number ranks over the whole
group; only ``AsyncLLM.generate`` counts from its own first rank.
"""

import os
from pathlib import Path
from typing import Final

from vllm import AsyncEngineArgs
from vllm.config import KVEventsConfig, ParallelConfig, VllmConfig
from vllm.usage.usage_lib import UsageContext

from backend_worker.engine import encodings
from backend_worker.engine.slow_structures import watch_structures
from common.errors import ConfigurationError
from common.vllm_compat.engine_arguments import check_arguments, check_configuration
from common.vllm_compat.features import hash_blocks_by_their_own_tokens


def served_ranks(parallel: ParallelConfig) -> list[int]:
    """Return the ranks that an AsyncLLM serves, ascending, numbered over the whole group."""
    if parallel.local_engines_only:
        first = parallel.data_parallel_index
        return list(range(first, first + parallel.data_parallel_size_local))
    return list(range(parallel.data_parallel_size))


def check_launch(config: VllmConfig) -> None:
    """Raise ConfigurationError for a launch whose ranks the worker could not serve."""
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1:
        return
    if parallel.data_parallel_rank_local is not None:
        raise ConfigurationError(
            "VLLM_DP_SIZE is for vLLM's offline inference: give --data-parallel-size instead"
        )
    if parallel.data_parallel_external_lb and not config.model_config.is_moe:
        raise ConfigurationError(
            "one rank of --data-parallel-size is served alone for mixture-of-experts models only: "
            "ranks of other models share nothing, so start workers without --data-parallel flags"
        )
    local = parallel.data_parallel_size_local
    if not parallel.local_engines_only and local < parallel.data_parallel_size:
        raise ConfigurationError(
            f"--data-parallel-size-local {local} of {parallel.data_parallel_size}: a worker could "
            "not tell when a rank on another node died; start one on each node, with "
            "--data-parallel-hybrid-lb and --data-parallel-start-rank"
        )


USAGE: Final = UsageContext.OPENAI_API_SERVER
"""Usage context given to vLLM, which chooses its default batch sizes by it."""


def prepare_environment(host: str) -> None:
    """Set vLLM's environment variables unless the user did, among them the host of KV events. Call
    this first: engine processes inherit the environment."""
    os.environ.setdefault("VLLM_HOST_IP", host)
    # Publish whole block hashes: 64 bits of one could collide with another image's.
    os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    # As `vllm serve` does. Otherwise vLLM forks the engine on a GPU while a thread of the renderer
    # warms up. A lock held by that thread would stay locked in the engine, and CUDA state
    # initialised here can't be used there.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # Python's tracker of shared memory tells at each end what it removes for vLLM's processes.
    filters = os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, filters))


def with_our_defaults(args: AsyncEngineArgs, given: frozenset[str]) -> AsyncEngineArgs:
    """Set the defaults that routing needs, in place, unless the user gave them."""
    for name in ("model", "tokenizer", "hf_config_path", "generation_config"):
        # The frontend reads these paths too, perhaps from another working directory, and the
        # model's name enters every media hash.
        value = getattr(args, name)
        if value not in (None, "auto", "vllm") and (path := Path(value)).is_dir():
            # One name for one directory: workers whose models have other names are refused.
            setattr(args, name, str(path.resolve() if ".." in path.parts else path.absolute()))
    if "prefix_caching_hash_algo" not in given:
        args.prefix_caching_hash_algo = "sha256_cbor"
    # vLLM would start and stop this process's profiler in any thread: the second thread kills it.
    args.profiler_config.ignore_frontend = True
    if "kv_events_config" not in given:
        args.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint="tcp://*:0",
            replay_endpoint="tcp://*:0",
        )
    return args


def engine_config(args: AsyncEngineArgs, encoder_cache_tokens: int = 0) -> VllmConfig:
    """Resolve engine arguments to vLLM's configuration, and check it.

    The encoder cache holds the tokens that one step prefills, or ``encoder_cache_tokens`` if that
    is more.

    Raises ConfigurationError: frontends can't follow an argument, or the ranks can't be served.
    Also raises vLLM's own errors for invalid arguments.
    """
    check_arguments(args)
    config = args.create_engine_config(USAGE)
    check_configuration(config)
    check_launch(config)
    hash_blocks_by_their_own_tokens(config)
    media = config.model_config.multimodal_config
    if media is not None:
        media.enable_mm_embeds = args.enable_mm_embeds
        media.allow_missing_mm_embeddings = False
    encodings.take_over(config)
    watch_structures(config)
    scheduler = config.scheduler_config
    scheduler.encoder_cache_size = max(scheduler.encoder_cache_size, encoder_cache_tokens)
    return config
