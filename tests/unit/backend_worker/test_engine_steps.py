"""What vLLM says of an engine's steps is counted, and no line is logged for each."""

import inspect
import math
from typing import Any, cast

import pytest
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerIterationDetails, SchedulerStats

from backend_worker.engine.statistics import MAX_STEP_MS, StatsBoard
from common.request_plane.step_sums import StepSums

CONFIG = cast(VllmConfig, None)
"""Not looked at."""


def details(**fields: Any) -> SchedulerStats:
    given: dict[str, Any] = {
        "iteration_index": 1,
        "num_ctx_requests": 2,
        "num_ctx_tokens": 100,
        "num_generation_requests": 3,
        "num_generation_tokens": 3,
        "elapsed_ms": 10.0,
        "num_encoder_inputs": 1,
        "num_encoder_output_tokens": 40,
    }
    found = SchedulerIterationDetails(**{**given, **fields})
    return SchedulerStats(iteration_details=found)


def of_tokens() -> IterationStats:
    stats = IterationStats()
    stats.time_to_first_tokens_iter = [0.2, 0.3]
    stats.inter_token_latencies_iter = [0.030, 0.012]
    return stats


@pytest.mark.parametrize("show_steps", [False, True])
def test_a_step_is_counted(show_steps: bool) -> None:
    board = StatsBoard(show_steps=show_steps)
    loggers = [board(CONFIG, rank) for rank in (0, 1)]
    told = details()
    loggers[1].record(told, of_tokens(), engine_idx=1)
    # vLLM's logger comes after ours, and logs what it finds.
    assert (told.iteration_details is not None) == show_steps
    assert board.steps() == [
        StepSums(0),
        StepSums(1).plus(140, 12.0),
    ]


def test_what_is_no_step() -> None:
    board = StatsBoard(show_steps=False)
    logger = board(CONFIG)
    logger.record(details(is_dummy=True), None)
    logger.record(SchedulerStats(num_running_reqs=2), of_tokens())  # as without statistics of steps
    logger.record(None, of_tokens())
    assert board.steps() == [StepSums(0)]
    assert board.latest()[0].num_running_reqs == 2


@pytest.mark.parametrize("ms", [MAX_STEP_MS + 1, math.inf, math.nan])
def test_steps_of_odd_length_do_not_count(ms: float) -> None:
    board = StatsBoard(show_steps=False)
    board(CONFIG).record(details(elapsed_ms=ms), None)
    assert board.steps() == [StepSums(0)]


def test_steps_that_only_decode_do_not_count() -> None:
    board = StatsBoard(show_steps=False)
    board(CONFIG).record(details(num_ctx_tokens=0, num_encoder_output_tokens=0), of_tokens())
    assert board.steps() == [StepSums(0)]


def test_a_step_without_outputs() -> None:
    board = StatsBoard(show_steps=False)
    board(CONFIG).record(details(), None)
    assert board.steps() == [StepSums(0).plus(140, 10.0)]


def test_our_loggers_come_before_vllm_s() -> None:
    source = inspect.getsource(StatLoggerManager.__init__)
    assert source.index(".extend(custom_stat_loggers)") < source.index("else LoggingStatLogger")
