"""Data-parallel ranks: which of them a worker serves, under each of vLLM's launches.

With internal balancing one AsyncLLM serves all ranks. With hybrid balancing there is a worker
on each node for the ranks of that node, with external balancing one for each rank. Ranks are
numbered over the whole group on cards, in KV events and on the request plane; only
``AsyncLLM.generate`` counts from the first that is its own.
"""

from vllm.config import ParallelConfig, VllmConfig

from common.errors import ConfigurationError


def served_ranks(parallel: ParallelConfig) -> list[int]:
    """The ranks that an AsyncLLM serves, ascending, numbered over the whole group."""
    if parallel.local_engines_only:
        first = parallel.data_parallel_index
        return list(range(first, first + parallel.data_parallel_size_local))
    return list(range(parallel.data_parallel_size))


def check_launch(config: VllmConfig) -> None:
    """Refuse launches under which a worker could not serve its ranks.

    Raises:
        ConfigurationError: names the flag and says why.
    """
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
