"""Settings of media processing and of the arena."""

from typing import Annotated, ClassVar, Self

from pydantic import Field

from common.cli.flag_settings import FlagSettings


class ArenaSettings(FlagSettings):
    """Shared memory of one frontend."""

    flag_group: ClassVar[str] = "arena"
    flag_prefix: ClassVar[str] = "mm-"

    arena_gb: Annotated[float, Field(ge=0.0, le=2.0**20, allow_inf_nan=False)] = Field(
        1.0,
        description="size of the shared memory through which processed media reach workers on "
        "this host; 0 sends them inline",
    )

    @property
    def arena_bytes(self) -> int:
        return int(self.arena_gb * 2**30)


class PreprocessSettings(FlagSettings):
    """Media processes."""

    flag_group: ClassVar[str] = "preprocessing"
    flag_prefix: ClassVar[str] = "preprocess-"

    workers: int = Field(
        0,
        ge=0,
        description="processes that decode and process media; 0 does it in the frontend's own, on "
        "one core",
    )

    def shared_by(self, processes: int) -> Self:
        """Return each process's share."""
        return self.model_copy(update={"workers": -(-self.workers // processes)})
