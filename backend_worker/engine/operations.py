"""The one file that has vLLM's engine do what operators want: sleep, forget, profile, reload."""

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.async_llm import AsyncLLM

from backend_worker.engine import encodings
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
from common.vllm_compat.features import profiler_options


async def operate(llm: AsyncLLM, operation: Operation) -> None:
    """Do one operation that the engine does not refuse, however long it takes.

    Raises:
        OperationRefusedError: it can't be done now, and nothing was done.
        Exception: vLLM's, of what failed.
    """
    match operation:
        case Sleep(level, mode):
            await llm.sleep(level, mode)
        case WakeUp(tags):
            await llm.wake_up(None if tags is None else list(tags))
        case ReleaseKvCacheMemory():
            await llm.release_kv_cache_memory()
        case Pause(mode, clear_cache):
            await llm.pause_generation(mode=mode, clear_cache=clear_cache)
        case Resume():
            await llm.resume_generation()
        case ResetPrefixCache(running, external):
            if not await llm.reset_prefix_cache(running, external):
                raise OperationRefusedError(
                    "blocks are in use: ask again when no request runs, or with "
                    "reset_running_requests, which has those that run begin again"
                )
        case ResetMmCache():
            await llm.reset_mm_cache()
        case ResetEncoderCache():
            await llm.reset_encoder_cache()
        case StartProfile():
            await _start_profile(llm, operation)
        case StopProfile():
            await llm.stop_profile()
        case ReloadWeights():
            await _reload_weights(llm)


def refuses(llm: AsyncLLM, operation: Operation) -> str:
    """Why an engine that was started so does not do an operation; empty if it does."""
    config = llm.vllm_config
    if why := encodings.refuses(config, operation):
        return why
    match operation:
        case Sleep(level) if level and not config.model_config.enable_sleep_mode:
            why = "the worker runs without --enable-sleep-mode, so no memory would be given back; "
            return why + "level 0 only pauses"
        case ReleaseKvCacheMemory() if not config.model_config.enable_sleep_mode:
            return "the worker runs without --enable-sleep-mode"
        case StartProfile() | StopProfile() if config.profiler_config.profiler is None:
            return "the worker runs without --profiler-config"
    return ""


async def _start_profile(llm: AsyncLLM, start: StartProfile) -> None:
    options = profiler_options(llm, start.profiler_kwargs)
    try:
        await llm.start_profile(
            start.profile_prefix,
            delay_iterations=start.delay_iterations,
            max_iterations=start.max_iterations,
            **options,
        )
    except (GracefulHTTPError, ValueError) as error:  # one runs, or the prefix is none
        raise OperationRefusedError(str(error)) from error


async def _reload_weights(llm: AsyncLLM) -> None:
    """From where the model was loaded. What other weights computed is forgotten."""
    await llm.collective_rpc("reload_weights")
    await llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    await llm.reset_mm_cache()
    await llm.reset_encoder_cache()
