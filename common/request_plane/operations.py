"""What an operator may have an engine do, as it goes over the request plane. No I/O.

The list is closed and every argument has a type: nobody names a method of vLLM's. What each does is
vLLM's own: the routes of ``vllm serve`` have the same names and arguments.
"""

from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What becomes of requests that run: they end as they are, are waited for, or stand still."""

Tag: TypeAlias = Literal["weights", "kv_cache", "scheduling"]  # what of an engine wakes up

Iterations: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]  # steps of an engine

ProfilerOptions: TypeAlias = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=128)], bool | int | float | str],
    msgspec.Meta(max_length=64),
]
"""Named arguments of PyTorch's profiler that can be written in JSON."""

LONGEST_MESSAGE = 2000  # characters of what a worker says about an operation


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Give memory back: level 0 only pauses, 1 keeps the weights in the host's memory, 2 keeps
    nothing."""

    level: Annotated[int, msgspec.Meta(ge=0, le=2)]
    mode: PauseMode


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up"):
    """Take it again, all of it or what the tags say."""

    tags: Annotated[list[Tag], msgspec.Meta(max_length=3)] | None = None


class ReleaseKvCacheMemory(msgspec.Struct, frozen=True, tag="release_kv_cache_memory"):
    """Give back the memory of KV blocks alone, of an engine that is paused."""


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Compute nothing until :class:`Resume`; KV blocks and media may be forgotten."""

    mode: PauseMode
    clear_cache: bool = True


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Compute again."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget KV blocks, perhaps the KV connector's as well. Requests that use some begin again, or
    else keep it from happening."""

    reset_running_requests: bool = False
    reset_external: bool = False


class ResetMmCache(msgspec.Struct, frozen=True, tag="reset_mm_cache"):
    """Forget media."""


class ResetEncoderCache(msgspec.Struct, frozen=True, tag="reset_encoder_cache"):
    """Forget what the encoder made of media."""


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Begin a profile, so many steps from now and for so many; ``profiler_kwargs`` are for vLLM
    0.33 and newer."""

    profile_prefix: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    delay_iterations: Iterations | None = None
    max_iterations: Iterations | None = None
    profiler_kwargs: ProfilerOptions | None = None


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """End it and write its files, on the worker's host."""


class ReloadWeights(msgspec.Struct, frozen=True, tag="reload_weights"):
    """Read the model's weights from where they came from, of an engine that is paused."""


class LoadLoraAdapter(msgspec.Struct, frozen=True, tag="load_lora_adapter"):
    """Have a LoRA adapter, by whose name requests may ask for it.

    Attributes:
        lora_path: where the worker finds its files, on its host, or by which name on a hub.
        load_inplace: read again what is there under the name.
    """

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    base_model_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None


class UnloadLoraAdapter(msgspec.Struct, frozen=True, tag="unload_lora_adapter"):
    """Have it no longer; requests that run with it end."""

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
    """Whether a worker takes requests, as far as operators have a say in it."""

    SERVING = "serving"
    PAUSED = "paused"
    ASLEEP = "asleep"


class Outcome(StrEnum):
    """What became of an operation at a worker."""

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
    """Whether the engine's media cache is empty afterwards."""
    match operation:
        case Sleep(level):
            return level > 0
        case Pause(clear_cache=clear_cache):
            return clear_cache
        case ResetMmCache() | ReleaseKvCacheMemory() | ReloadWeights():
            return True
    return False


def empties_blocks(operation: Operation) -> bool:
    """Whether the engine holds no KV blocks afterwards."""
    match operation:
        case ResetPrefixCache():
            return True
        case ResetMmCache():
            return False
    return empties_media(operation)
