"""Settings of media transfer and its networks."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from common.cli.flag_settings import FlagSettings
from common.transfer.nixl_processes import NixlNetwork, narrowed
from common.transfer.transports import TransferMode

_DEVICES = re.compile(r"[\w.:,-]{1,255}")


def _word(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


class TransferSettings(FlagSettings):
    """Two variables with the names that operators know from Dynamo."""

    flag_group: ClassVar[str] = "transfer"
    variables: ClassVar[dict[str, str]] = {
        "wanted": "DYNAMO_MM_TRANSFER",
        "disabled": "DYNAMO_DISABLE_NIXL_MM",
    }

    wanted: Annotated[Literal["auto", "shm", "nixl"] | None, BeforeValidator(_word)] = Field(
        None,
        description="how processed media reach workers; auto takes shared memory where a "
        "worker can map it, else NIXL; unset is auto",
    )
    disabled: Annotated[bool, BeforeValidator(_word)] = Field(
        False, description="send media as they came, for workers to process themselves"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.disabled and self.wanted:
            raise ValueError(
                f"DYNAMO_DISABLE_NIXL_MM=1 turns transfer off, but DYNAMO_MM_TRANSFER is "
                f"{self.wanted!r}"
            )
        return self

    @property
    def mode(self) -> TransferMode:
        return TransferMode.DISABLED if self.disabled else TransferMode(self.wanted or "auto")


class NixlSettings(FlagSettings):
    """Networks that NIXL may use; by default only this host."""

    flag_group: ClassVar[str] = "NIXL"
    flag_prefix: ClassVar[str] = "nixl-"
    variables: ClassVar[dict[str, str]] = {"ucx_tls": "UCX_TLS"}

    interface: str | None = Field(
        None,
        description="network device over which NIXL may reach other hosts, as UCX names it: "
        "mlx5_0:1 for RDMA, eth0 for TCP, several with commas between them; without it NIXL "
        "stays on this host",
    )
    allow_tcp: bool = Field(
        False,
        description="let NIXL use TCP, over loopback unless --nixl-interface says otherwise. TCP "
        "does not protect memory: a peer on the port can read and overwrite the memory of "
        "the process that serves the arena, and of the one that reads for a worker. These hold "
        "nothing else, and what was overwritten is found out; but media can be read by all on "
        "that network",
    )
    ucx_tls: str | None = Field(
        None, description="UCX's transports, of which no other is used then; a list with commas"
    )

    @field_validator("interface")
    @classmethod
    def _names_devices(cls, interface: str | None) -> str | None:
        # "all" is UCX's word for every network, and "^" for all but some.
        if interface and (not _DEVICES.fullmatch(interface) or interface == "all"):
            raise ValueError("it must name devices")
        return interface or None

    def network(self) -> NixlNetwork:
        """Combine the three. Raises ConfigurationError: NIXL can't use these networks."""
        network = NixlNetwork(self.interface, self.allow_tcp, narrowed(self.ucx_tls))
        network.transports()
        return network
