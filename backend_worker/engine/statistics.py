"""What vLLM says of an engine while it runs: how busy it is, and each of its steps."""

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from backend_worker.engine.step_counter import StepCounter
from common.request_plane.step_sums import EngineSums


class _LatestStats(StatLoggerBase):
    """Keeps the newest scheduler statistics of one rank, by its number in its group, and counts
    its steps.

    Args:
        show_steps: whether vLLM's own logger, which comes after, may write a line for each step.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_index: int = 0, *, show_steps: bool = False
    ) -> None:
        self.rank = engine_index
        self.scheduler = SchedulerStats()
        self.steps = StepCounter()
        self._show_steps = show_steps

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        self.scheduler = scheduler_stats
        details = scheduler_stats.iteration_details
        if details is None:
            return
        if not self._show_steps:
            scheduler_stats.iteration_details = None
        if not details.is_dummy:
            tokens = iteration_stats
            self.steps.add(
                prefill=details.num_ctx_tokens,
                encode=details.num_encoder_output_tokens,
                decode=details.num_generation_requests,
                prompts=len(tokens.time_to_first_tokens_iter) if tokens else 0,
                waited_ms=details.elapsed_ms,
                since_last_ms=[1e3 * one for one in tokens.inter_token_latencies_iter]
                if tokens
                else (),
            )

    def log_engine_initialized(self) -> None:
        pass


class StatsBoard:
    """vLLM's factory of a logger per rank, which remembers what it made.

    Args:
        show_steps: as in :class:`_LatestStats`.
    """

    def __init__(self, *, show_steps: bool) -> None:
        self._show_steps = show_steps
        self._ranks: list[_LatestStats] = []

    def __call__(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        made = _LatestStats(vllm_config, engine_index, show_steps=self._show_steps)
        self._ranks.append(made)
        return made

    def latest(self) -> dict[int, SchedulerStats]:
        """The newest statistics of every rank that has any."""
        return {rank.rank: rank.scheduler for rank in self._ranks}

    def steps(self) -> list[EngineSums]:
        """What the steps of every rank add up to."""
        return [rank.steps.sums(rank.rank) for rank in self._ranks]
