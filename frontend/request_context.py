"""What is known of the HTTP request that a task works on: one value in one context variable.

vLLM's own code stands between the HTTP server, which learns most of it, and those who need it. A
task that is begun for a request takes what was known by then along.
"""

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final, NewType

from common.errors import SaltLostError
from common.media.cache_partition import Partition, partition_of

Tenant = NewType("Tenant", str)
"""Names an API key without telling it: a digest."""

EVERYBODY: Final = Tenant("")
"""The one tenant of a frontend without API keys."""


@dataclass(frozen=True)
class RequestContext:
    """What is known of a request.

    Attributes:
        tenant: whose it is: every API key is a tenant of its own.
        isolated: whether each tenant's salts are its own, and having none is a salt
            (``--isolate-api-keys``).
        salt: ``cache_salt`` of its body, None if it says nothing.
        arrived: when it was there as a whole, by ``time.perf_counter``.
        engine_calls: numbers the engine's calls that are made for it.
    """

    tenant: Tenant = EVERYBODY
    isolated: bool = False
    salt: str | None = None
    arrived: float | None = None
    engine_calls: Iterator[int] | None = None


_NONE: Final = RequestContext()
current_context: Final[ContextVar[RequestContext]] = ContextVar("request context", default=_NONE)
"""Of the request that this task works on; nothing is known if it works on none."""


def begin(engine_calls: Iterator[int]) -> None:
    """Forget the request before: a client's next one may start in the task of its last."""
    current_context.set(RequestContext(engine_calls=engine_calls))


def note_tenant(tenant: Tenant, *, isolated: bool = False) -> None:
    """Note whose the request is."""
    current_context.set(replace(current_context.get(), tenant=tenant, isolated=isolated))


def note_arrival(arrived: float) -> None:
    """Note that the request is there as a whole."""
    current_context.set(replace(current_context.get(), arrived=arrived))


def note_salt(body: object) -> None:
    """Note the salt that a parsed body says, whichever of vLLM's routes it is for.

    vLLM knows it once a prompt is rendered; media are fetched and processed before that. What is no
    salt gets vLLM's 400, wherever vLLM looks at it.
    """
    salt = body.get("cache_salt") if isinstance(body, dict) else None
    current_context.set(
        replace(current_context.get(), salt=salt if isinstance(salt, str) else None)
    )


def current_partition() -> Partition:
    """Return the partition of the request that this task works on."""
    request = current_context.get()
    return partition_of(request.salt, request.tenant if request.isolated else "")


def salt_of_blocks(salt: str | None) -> str | None:
    """Return the salt for the block hashes of this task's request.

    Args:
        salt: of its rendered prompt.

    Raises:
        SaltLostError: its media were kept under another.
    """
    request = current_context.get()
    if salt is not None and salt != request.salt:
        raise SaltLostError("the request's cache_salt came too late to keep its media apart")
    return current_partition() if request.isolated else salt
