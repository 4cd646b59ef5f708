"""Operations that an operator may run on an engine, as request plane messages. No I/O.

The list is closed and every argument typed: no message names a method of vLLM. Names, arguments and
meaning are those of ``vllm serve``'s routes.
"""

from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""Fate of requests in flight: aborted, waited for, or kept paused."""

Tag: TypeAlias = Literal["weights", "kv_cache", "scheduling"]  # parts of an engine to wake up

Iterations: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]  # steps of an engine

ProfilerOptions: TypeAlias = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=128)], bool | int | float | str],
    msgspec.Meta(max_length=64),
]
"""Named arguments of PyTorch's profiler that can be written in JSON."""

MAX_MESSAGE_LEN = 2000  # characters of a worker's message about an operation


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Free memory: level 0 only pauses, 1 moves the weights to host memory, 2 discards them."""

    level: Annotated[int, msgspec.Meta(ge=0, le=2)]
    mode: PauseMode


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up"):
    """Restore all memory, or only the tags'."""

    tags: Annotated[list[Tag], msgspec.Meta(max_length=3)] | None = None


class ReleaseKvCacheMemory(msgspec.Struct, frozen=True, tag="release_kv_cache_memory"):
    """Free the KV blocks' memory alone. The engine must be paused."""


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Compute nothing until :class:`Resume`; may clear KV blocks and media."""

    mode: PauseMode
    clear_cache: bool = True


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """End a pause."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Clear KV blocks, perhaps the KV connector's too. Running requests restart or prevent it."""

    reset_running_requests: bool = False
    reset_external: bool = False


class ResetMmCache(msgspec.Struct, frozen=True, tag="reset_mm_cache"):
    """Clear the media cache."""


class ResetEncoderCache(msgspec.Struct, frozen=True, tag="reset_encoder_cache"):
    """Clear the encoder's outputs."""


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Start a profile after and for some steps; ``profiler_kwargs`` need vLLM 0.33 or newer."""

    profile_prefix: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    delay_iterations: Iterations | None = None
    max_iterations: Iterations | None = None
    profiler_kwargs: ProfilerOptions | None = None


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """End the profile and write its files on the worker's host."""


class ReloadWeights(msgspec.Struct, frozen=True, tag="reload_weights"):
    """Reload the model's weights from their source. The engine must be paused."""


class LoadLoraAdapter(msgspec.Struct, frozen=True, tag="load_lora_adapter"):
    """Load a LoRA adapter, which requests select by its name. ``lora_path`` is on the worker's host
    or a hub; ``load_inplace`` replaces an adapter of the same name."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    base_model_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None


class UnloadLoraAdapter(msgspec.Struct, frozen=True, tag="unload_lora_adapter"):
    """Unload an adapter; running requests with it end."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


Operation: TypeAlias = (
    Sleep
    | WakeUp
    | ReleaseKvCacheMemory
    | Pause
    | Resume
    | ResetPrefixCache
    | ResetMmCache
    | ResetEncoderCache
    | StartProfile
    | StopProfile
    | ReloadWeights
    | LoadLoraAdapter
    | UnloadLoraAdapter
)

LETS_REQUESTS_IN: Final = (StartProfile, StopProfile, LoadLoraAdapter, UnloadLoraAdapter)
"""Operations during which requests go on as ever."""


class Condition(StrEnum):
    """Whether a worker takes requests, as set by operators."""

    SERVING = "serving"
    PAUSED = "paused"
    ASLEEP = "asleep"


class Outcome(StrEnum):
    """Outcome of an operation."""

    DONE = "done"
    REFUSED = "refused"  # nothing was done, and nothing will be as things are
    FAILED = "failed"  # it was begun, and perhaps done in part


def has_adapter_already(name: str) -> str:
    return f"it has an adapter {name} already: load_inplace reads it again"


def has_no_adapter(name: str) -> str:
    return f"it has no adapter {name!r}"


def has_the_models_name(name: str) -> str:
    return f"{name} is the name of the model"


def name_of(operation: Operation) -> str:
    return str(operation.__struct_config__.tag)


def empties_media(operation: Operation) -> bool:
    """Return whether the engine's media cache is empty afterwards."""
    match operation:
        case Sleep(level):
            return level > 0
        case Pause(clear_cache=clear_cache):
            return clear_cache
        case ResetMmCache() | ReleaseKvCacheMemory() | ReloadWeights():
            return True
    return False


def empties_blocks(operation: Operation) -> bool:
    """Return whether the engine holds no KV blocks afterwards."""
    match operation:
        case ResetPrefixCache():
            return True
        case ResetMmCache():
            return False
    return empties_media(operation)
