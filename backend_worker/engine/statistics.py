"""Statistics of a running engine: load, and each step."""

from typing import Final

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from common.request_plane.step_sums import StepSums

MAX_STEP_MS: Final = 60_000.0
"""A longer step was no step: the engine was paused, or its host asleep."""


class _LatestStats(StatLoggerBase):
    """Keep the newest scheduler statistics of one rank of a group, and the sums over its steps.
    With ``show_steps`` vLLM's own logger, which runs later, sees each step."""

    def __init__(
        self, vllm_config: VllmConfig, engine_index: int = 0, *, show_steps: bool = False
    ) -> None:
        self.rank = engine_index
        self.scheduler = SchedulerStats()
        self.steps = StepSums(engine_index)
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
        tokens = details.num_ctx_tokens + details.num_encoder_output_tokens
        if not details.is_dummy and tokens:
            since_last_s = iteration_stats.inter_token_latencies_iter if iteration_stats else ()
            self._add(tokens, details.elapsed_ms, 1e3 * min(since_last_s, default=0.0))

    def _add(self, tokens: int, waited_ms: float, since_last_ms: float) -> None:
        """Add one step with prompts.

        Args:
            waited_ms: time the engine waited for the device: less than the step if the engine
                prepared the next step meanwhile.
            since_last_ms: minimum time between two tokens of a request; 0 if nothing decodes. The
                minimum, because a request may have skipped the previous step.
        """
        ms = max(waited_ms, since_last_ms)
        if 0.0 <= ms <= MAX_STEP_MS:
            self.steps = self.steps.plus(tokens, ms)

    def log_engine_initialized(self) -> None:
        pass


class StatsBoard:
    """vLLM's factory of one logger per rank, which keeps the loggers."""

    def __init__(self, *, show_steps: bool) -> None:
        self._show_steps = show_steps
        self._ranks: list[_LatestStats] = []

    def __call__(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        made = _LatestStats(vllm_config, engine_index, show_steps=self._show_steps)
        self._ranks.append(made)
        return made

    def latest(self) -> dict[int, SchedulerStats]:
        return {rank.rank: rank.scheduler for rank in self._ranks}

    def steps(self) -> list[StepSums]:
        return [rank.steps for rank in self._ranks]
