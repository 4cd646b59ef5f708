"""Settings of the router."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from common.cli.flag_settings import FlagSettings, unknown
from common.extensions import ROUTER_MODES, names_of
from frontend.router.modes import BuiltInMode, mode_named


def _known(mode: str) -> str:
    known = [*BuiltInMode, *names_of(ROUTER_MODES)]
    if mode not in known:
        raise ValueError(unknown(mode, known))
    mode_named(mode)  # fail at start if a package can't be imported
    return str(mode)


Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class RouterSettings(FlagSettings):
    flag_group: ClassVar[str] = "routing"
    flag_prefix: ClassVar[str] = "router-"

    mode: Annotated[str, AfterValidator(_known)] = Field(
        BuiltInMode.KV,
        description="how a worker is chosen for each request. "
        + "; ".join(f"{mode}: {mode.description}" for mode in BuiltInMode)
        + "; or the name of a mode of an installed package",
    )
    busy_blocks_fraction: float = Field(
        0.95,
        ge=0.0,
        allow_inf_nan=False,
        description="share of its KV cache in use above which a worker gets no more requests; "
        "1 or more never",
    )
    busy_prefill_tokens: int = Field(
        262_144,
        ge=0,
        description="prompt tokens waiting for prefill from which on a worker gets no more "
        "requests; 0 never",
    )
    eject_base_s: Seconds = Field(
        1.0,
        description="how long it is out the first time; doubled with each relapse, up to a minute "
        "or this, whichever is longer",
    )
    stall_s: Seconds = Field(
        120.0,
        description="how long a worker with requests may stay silent on all of them before it "
        "counts as stalled and they go elsewhere",
    )
