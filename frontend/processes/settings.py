"""The flag that says how many processes a frontend has."""

from typing import ClassVar

from pydantic import Field

from common.cli.flag_settings import FlagSettings


class ProcessesSettings(FlagSettings):
    """How many cores a frontend may use for serving."""

    flag_group: ClassVar[str] = "processes"

    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that serve on one port and share one arena; what is limited for the "
        "frontend is divided among them",
    )
