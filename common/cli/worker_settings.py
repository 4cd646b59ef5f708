"""Identity, address and capacity of a worker."""

from typing import ClassVar

from pydantic import Field, field_validator

from common.cli.flag_settings import FlagSettings


class WorkerSettings(FlagSettings):
    """Identity, address and capacity of the worker."""

    flag_group: ClassVar[str] = "worker"

    worker_id: str | None = Field(
        None,
        pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        description="name of this worker, of letters, digits, '.', '_' and '-', stable over "
        "restarts if you give one; without it the name is new each time",
    )
    worker_host: str = Field(
        "127.0.0.1",
        description="address of this host on which requests and KV events are served, and that "
        "frontends connect to; one that leaves this host needs --fleet-key-file",
    )
    worker_port: int = Field(
        0, ge=0, le=65535, description="port of the request plane, 0 for any free one"
    )
    encoder_cache_tokens: int = Field(
        0,
        ge=0,
        le=1 << 24,
        description="media tokens whose encodings the engine keeps, so that a picture asked about "
        "again is not encoded again; 0 for as many as a step prefills, which is vLLM's choice. "
        "What they take beyond that, vLLM does not reckon with: leave GPU memory for them",
    )

    @field_validator("worker_host")
    @classmethod
    def _one_address(cls, host: str) -> str:
        # The card carries the address, and on another host these would mean that host itself.
        if host.strip() in ("", "*", "0.0.0.0", "::", "[::]"):
            raise ValueError("frontends connect to it, so it must be one address of this host")
        return host

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.worker_host}:{self.worker_port}"
