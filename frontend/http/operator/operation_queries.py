"""Parse the queries and bodies of operations: one function each.

Names and values are vLLM's. Two defaults differ: running requests are waited for, not aborted.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias, get_args

from fastapi import HTTPException, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from common.request_plane.operations import (
    LoadLoraAdapter,
    Operation,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    Tag,
    UnloadLoraAdapter,
    WakeUp,
)

Read: TypeAlias = Callable[..., Operation]
"""Makes an operation of request parameters, which FastAPI finds by its signature."""

Level = Annotated[int, Query(ge=0, le=2)]
Mode = Annotated[PauseMode, Query()]
Flag = Annotated[bool, Query()]


class Profile(BaseModel):
    """Options of a profile; without them ``--profiler-config`` applies."""

    model_config = ConfigDict(extra="forbid", strict=True)

    profile_prefix: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    delay_iterations: int | None = Field(None, ge=0, le=1 << 31)
    max_iterations: int | None = Field(None, ge=0, le=1 << 31)
    profiler_kwargs: (
        dict[
            Annotated[str, Field(max_length=128)],
            bool | int | float | Annotated[str, Field(max_length=4096)],
        ]
        | None
    ) = Field(None, max_length=64)


class Loading(BaseModel):
    """A LoRA adapter to load; the fields are vLLM's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str = Field(min_length=1, max_length=128)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class Unloading(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str = Field(min_length=1, max_length=128)


def _load_lora_adapter(adapter: Loading) -> Operation:
    return LoadLoraAdapter(**adapter.model_dump())


def _unload_lora_adapter(adapter: Unloading) -> Operation:
    return UnloadLoraAdapter(adapter.lora_name)


def _sleep(level: Level = 1, mode: Mode = "wait") -> Operation:
    return Sleep(level, mode)


def _pause(mode: Mode = "wait", clear_cache: Flag = True) -> Operation:
    return Pause(mode, clear_cache)


def _wake_up(tags: Annotated[list[Tag] | None, Query()] = None) -> Operation:
    return WakeUp(None if not tags else list(dict.fromkeys(tags)))


def _reset_prefix_cache(
    reset_running_requests: Flag = False, reset_external: Flag = False
) -> Operation:
    return ResetPrefixCache(reset_running_requests, reset_external)


def _start_profile(profile: Profile | None = None) -> Operation:
    return StartProfile(**({} if profile is None else profile.model_dump()))


_WITH_PARAMETERS: Final[Mapping[type[Operation], Read]] = MappingProxyType(
    {
        Sleep: _sleep,
        WakeUp: _wake_up,
        Pause: _pause,
        ResetPrefixCache: _reset_prefix_cache,
        StartProfile: _start_profile,
        LoadLoraAdapter: _load_lora_adapter,
        UnloadLoraAdapter: _unload_lora_adapter,
    }
)

READS: Final[Mapping[str, Read]] = MappingProxyType(
    {
        str(kind.__struct_config__.tag): _WITH_PARAMETERS.get(kind, kind)
        for kind in get_args(Operation)
    }
)
"""The parser of each operation, by name."""


def refuse_unknown(request: Request, read: Read, *more: str) -> None:
    """Answer 422 to a misspelt parameter, or a default would apply. ``more`` are known too."""
    of_bodies = {"adapter", "profile"}
    known = {*signature(read).parameters, *more} - of_bodies
    for name in request.query_params:
        if name not in known:
            allowed = ", ".join(sorted(known)) or "none"
            raise HTTPException(422, f"there is no parameter {name!r}; there is: {allowed}")
