"""Operations on the engine (sleep, reset caches, profile, reload) and the state that they leave it
in. The one file that calls vLLM's engine for operations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.async_llm import AsyncLLM

from backend_worker.engine import encodings
from common.errors import OperationRefusedError
from common.request_plane.operations import (
    Condition,
    LoadLoraAdapter,
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
    Tag,
    WakeUp,
)
from common.vllm_compat.features import profiler_options

MEMORY: Final = frozenset({"weights", "kv_cache"})  # kinds of memory that an engine can free

_NO_WEIGHTS: Final = "its weights were given up: have them reloaded (reload_weights)"


@dataclass(frozen=True)
class EngineState:
    """State of an engine between two operations, or during one.

    Attributes:
        level: sleep level; None when awake.
        resident: kinds of memory that are present.
        weights_lost: the weights' memory does not hold the model.
        kept: requests may be frozen in the engine.
    """

    condition: Condition = Condition.SERVING
    level: int | None = None
    resident: frozenset[str] = MEMORY
    weights_lost: bool = False
    kept: bool = False

    @property
    def refusal(self) -> str:
        """Reason why no request is taken; empty if requests are taken."""
        if self.condition is Condition.SERVING:
            return ""
        if self.weights_lost and self.resident == MEMORY:
            return f"it is {self.condition}, and {_NO_WEIGHTS}"
        return f"it is {self.condition}"

    def refuses(self, operation: Operation) -> str:
        """Return why an operation can't begin; empty if it can. vLLM would begin some of these, and
        compute with memory that is not there."""
        given_up = self.resident != MEMORY
        match operation:
            case Sleep(2, "keep"):
                return "requests would go on without weights: let them end (mode wait or abort)"
            case Sleep(2) if self.kept:
                return "requests stand still and would go on without weights: resume it first"
            case Sleep(level) if "weights" not in self.resident and level != self.level:
                return f"it is asleep at level {self.level} already: wake it up first"
            case Pause() | StartProfile() | LoadLoraAdapter() if given_up:
                return "it is asleep: wake it up first"
            case Resume() if given_up or self.level:
                return "it is asleep: it is woken up (wake_up), not resumed"
            case ReleaseKvCacheMemory() if self.condition is Condition.SERVING:
                return "it serves requests: pause it first"
            case ReleaseKvCacheMemory() if given_up:
                return "it has given up memory already"
            case ReloadWeights() if self.condition is Condition.SERVING:
                return "it serves requests: pause it first"
            case ReloadWeights() if "weights" not in self.resident:
                return "it is asleep: wake up its weights first"
        return ""

    def needs_nothing(self, operation: Operation) -> bool:
        """Return whether the requested state holds already, so the engine need not be called."""
        match operation:
            case Sleep():
                return "weights" not in self.resident
            case WakeUp(tags) if tags is not None:
                return not self.asleep_of(tags)
            case ResetPrefixCache() | ResetMmCache() | ResetEncoderCache():
                return self.resident != MEMORY
        return False

    def asleep_of(self, tags: Sequence[Tag]) -> list[Tag]:
        """Return only the sleeping tags: with one awake tag among them vLLM wakes none."""
        return [tag for tag in tags if tag not in self.resident]

    def during(self, operation: Operation) -> "EngineState":
        """Return the state from the moment an operation is requested."""
        match operation:
            case Sleep():
                return replace(self, condition=Condition.ASLEEP)
            case Pause() if self.condition is Condition.SERVING:
                return replace(self, condition=Condition.PAUSED)
        return self

    def after(self, operation: Operation, *, rests: bool) -> "EngineState":
        """Return the state after an operation; ``rests``: the engine is paused or asleep."""
        state = self
        match operation:
            case Pause("keep") | Sleep(_, "keep"):
                state = replace(self, kept=True)
            case Pause() | Sleep():
                state = replace(self, kept=False)
        match operation:
            case Sleep(level):
                gone = MEMORY if level else frozenset()
                lost = level == 2 or self.weights_lost
                left = self.resident - gone
                state = EngineState(Condition.ASLEEP, level, left, lost, state.kept)
            case ReleaseKvCacheMemory():
                left = self.resident - {"kv_cache"}
                state = replace(self, condition=Condition.ASLEEP, level=1, resident=left)
            case WakeUp(tags):
                there = MEMORY if tags is None else self.resident | (MEMORY & set(tags))
                state = replace(self, resident=there)
            case ReloadWeights():
                state = replace(self, weights_lost=False)
        if rests or state.resident != MEMORY:
            return state
        if state.weights_lost:
            return replace(state, condition=Condition.ASLEEP)
        return EngineState()


async def operate(llm: AsyncLLM, operation: Operation) -> None:
    """Run one operation, without a time limit. Raises OperationRefusedError: not possible now, and
    nothing was done. Also raises vLLM's errors."""
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
    """Return why an engine with these flags never does an operation; empty if it does."""
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
    except (GracefulHTTPError, ValueError) as error:  # already running, or an invalid prefix
        raise OperationRefusedError(str(error)) from error


async def _reload_weights(llm: AsyncLLM) -> None:
    """Reload from the model's original source, and drop every cache of the old weights."""
    await llm.collective_rpc("reload_weights")
    await llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    await llm.reset_mm_cache()
    await llm.reset_encoder_cache()
