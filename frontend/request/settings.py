"""Flags of retries and time-outs of requests."""

from typing import Annotated, ClassVar

from pydantic import Field

from common.cli.flag_settings import FlagSettings

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class FaultSettings(FlagSettings):
    """Handling of workers that are lost or slow."""

    flag_group: ClassVar[str] = "faults"

    migration_limit: int = Field(
        3, ge=0, description="how often one request may be given to another worker; 0 never"
    )
    worker_wait_s: Seconds = Field(
        60.0,
        description="how long a request that lost its worker waits for another to come if there is "
        "none, for one that is not too busy or paused, and for the retry budget; 0 not at all",
    )
    request_timeout_s: Seconds = Field(
        0.0,
        description="how long a request may take once its prompt is processed; 0 for any time",
    )
    output_timeout_s: Seconds = Field(
        0.0,
        description="how long a request may get no output from a worker that is alive otherwise, "
        "time in its queue included, before it is taken from there; 0 for any time",
    )
