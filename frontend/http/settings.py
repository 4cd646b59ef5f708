"""Flags of the HTTP server: limits of size, number and time."""

from typing import Annotated, ClassVar, Final, Self

from pydantic import Field

from common.cli.flag_settings import FlagSettings

Positive = Annotated[float, Field(gt=0.0, le=1e9, allow_inf_nan=False)]

TOKENS_AN_INPUT: Final = 512
"""Tokens of one pooling request, for each input that it may have. OpenAI takes 300,000 in all."""


class HttpSettings(FlagSettings):
    """Limits on connections, heads, bodies and unread answers."""

    flag_group: ClassVar[str] = "HTTP"

    max_inflight: int = Field(
        1024, ge=1, description="requests worked on at once; one more is answered 429"
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="open connections of clients; for one more the longest idle one is closed, and "
        "if none is idle it is answered 503",
    )
    max_body_mb: Positive = Field(
        64.0, description="largest body of a request; a larger one is answered 413"
    )
    body_memory_mb: Positive = Field(
        2048.0,
        description="memory for the bodies of all requests, those that still arrive included; "
        "what doesn't fit is answered 429",
    )
    key_share: float = Field(
        0.5,
        gt=0.0,
        le=1.0,
        description="what the requests of one API key may take of --max-inflight and "
        "--body-memory-mb, as a fraction; holds where there are several keys",
    )
    max_choices: int = Field(
        1024,
        ge=1,
        description="answers that one request may ask for: n times its prompts; more are answered "
        "400",
    )
    max_pooling_inputs: int = Field(
        2048,
        ge=1,
        description="inputs of one request for embeddings, scores or what else is pooled; more, or "
        f"more than {TOKENS_AN_INPUT} tokens for each of as many, are answered 400",
    )
    pooling_memory_mb: Positive = Field(
        512.0,
        description="memory for pooled answers until they are sent; what doesn't fit is answered "
        "429, or 400 if it never will",
    )
    body_timeout_s: Positive = Field(
        60.0, description="how long the body of a request may take to arrive"
    )
    send_timeout_s: Positive = Field(
        60.0,
        description="how long a client may take for 256 KiB of its answer, or for all that is "
        "there of it, before it is disconnected",
    )

    def shared_by(self, processes: int) -> Self:
        """Return the part of each process."""
        return self.model_copy(
            update={
                "max_inflight": -(-self.max_inflight // processes),
                "max_connections": -(-self.max_connections // processes),
                "body_memory_mb": self.body_memory_mb / processes,
                "pooling_memory_mb": self.pooling_memory_mb / processes,
            }
        )

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 2**20)

    @property
    def body_memory_bytes(self) -> int:
        """At least one body of the largest size."""
        return max(self.max_body_bytes, int(self.body_memory_mb * 2**20))

    @property
    def max_pooling_tokens(self) -> int:
        """Of all inputs of one request. A lower limit on inputs leaves it as it is."""
        return TOKENS_AN_INPUT * max(2048, self.max_pooling_inputs)

    @property
    def pooling_memory_bytes(self) -> int:
        return int(self.pooling_memory_mb * 2**20)
