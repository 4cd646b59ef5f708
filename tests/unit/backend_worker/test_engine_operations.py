"""Each operation is the call of vLLM's that it is named after, or is refused with a reason."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import call, create_autospec

import pytest
from vllm import AsyncEngineArgs
from vllm.config import ProfilerConfig
from vllm.exceptions import ProfilerAlreadyActiveError
from vllm.v1.engine.async_llm import AsyncLLM

from backend_worker.engine.config import with_our_defaults
from backend_worker.engine.operations import operate, refuses
from common.errors import OperationRefusedError
from common.request_plane.operations import (
    Operation,
    Pause,
    ReleaseKvCacheMemory,
    ReloadWeights,
    ResetEncoderCache,
    ResetMmCache,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)


def engine(*, sleep_mode: bool = True, profiler: str | None = "torch") -> Any:
    """vLLM's engine with the signatures of its methods, which does nothing."""
    llm = create_autospec(AsyncLLM, instance=True)
    llm.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleep_mode),
        profiler_config=SimpleNamespace(profiler=profiler),
        ec_transfer_config=None,
    )
    return llm


@pytest.mark.parametrize(
    ("operation", "calls"),
    [
        (Sleep(2, "keep"), [call.sleep(2, "keep")]),
        (WakeUp(), [call.wake_up(None)]),
        (WakeUp(["weights"]), [call.wake_up(["weights"])]),
        (ReleaseKvCacheMemory(), [call.release_kv_cache_memory()]),
        (Pause("wait", False), [call.pause_generation(mode="wait", clear_cache=False)]),
        (Resume(), [call.resume_generation()]),
        (ResetPrefixCache(True, False), [call.reset_prefix_cache(True, False)]),
        (ResetMmCache(), [call.reset_mm_cache()]),
        (ResetEncoderCache(), [call.reset_encoder_cache()]),
        (
            StartProfile("mine", 1, 2),
            [call.start_profile("mine", delay_iterations=1, max_iterations=2)],
        ),
        (StopProfile(), [call.stop_profile()]),
        (
            ReloadWeights(),
            [
                call.collective_rpc("reload_weights"),
                call.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
                call.reset_mm_cache(),
                call.reset_encoder_cache(),
            ],
        ),
    ],
)
async def test_it_is_vllms_own(operation: Operation, calls: list[Any]) -> None:
    llm = engine()
    llm.reset_prefix_cache.return_value = True
    await operate(llm, operation)
    assert llm.mock_calls == calls


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (Sleep(1, "wait"), "--enable-sleep-mode"),
        (Sleep(2, "wait"), "level 0 only pauses"),
        (ReleaseKvCacheMemory(), "--enable-sleep-mode"),
        (StartProfile(), "--profiler-config"),
        (StopProfile(), "--profiler-config"),
    ],
)
def test_what_an_engine_was_not_started_for(operation: Operation, words: str) -> None:
    llm = engine(sleep_mode=False, profiler=None)
    assert words in refuses(llm, operation)
    assert refuses(llm, Sleep(0, "wait")) == ""  # gives nothing back
    assert refuses(engine(), operation) == ""
    assert llm.mock_calls == []


def test_what_encodings_of_a_connector_would_survive() -> None:
    llm = engine()
    assert refuses(llm, ReloadWeights()) == ""
    llm.vllm_config.ec_transfer_config = object()
    assert "restart the worker" in refuses(llm, ReloadWeights())
    assert refuses(llm, WakeUp()) == ""


async def test_blocks_in_use_and_profiles_under_way_are_refusals() -> None:
    llm = engine()
    llm.reset_prefix_cache.return_value = False
    with pytest.raises(OperationRefusedError, match="blocks are in use"):
        await operate(llm, ResetPrefixCache())
    for error in (ProfilerAlreadyActiveError(), ValueError("profile_prefix must be")):
        llm.start_profile.side_effect = error
        with pytest.raises(OperationRefusedError, match="profil"):
            await operate(llm, StartProfile())


def test_the_workers_own_process_is_not_profiled() -> None:
    """vLLM would do it in any threads, and PyTorch's second session there ends the process."""
    profiler = ProfilerConfig(profiler="torch", torch_profiler_dir="/tmp")
    assert profiler.should_profile_frontend
    args = AsyncEngineArgs(profiler_config=profiler)
    given = frozenset({"profiler_config"})
    assert not with_our_defaults(args, given).profiler_config.should_profile_frontend
    with_our_defaults(AsyncEngineArgs(), frozenset())  # without one
