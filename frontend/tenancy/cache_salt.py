"""The ``cache_salt`` of the request that a task works on, and the partition it names.

vLLM knows the salt once a prompt is rendered; media are fetched and processed before that.
So it is taken from the parsed body, whichever of vLLM's routes it is for.
"""

from contextvars import ContextVar
from typing import Final

from common.errors import SaltLostError
from common.media.cache_partition import Partition, partition_of
from frontend.tenancy.tenant import current_tenant

current_salt: Final[ContextVar[str | None]] = ContextVar("cache_salt", default=None)
"""What the request's body says, None if it says nothing."""

tenants_apart: Final[ContextVar[bool]] = ContextVar("tenants_apart", default=False)
"""Whether each tenant's salts are its own, and having none is a salt (``--isolate-api-keys``)."""


def note_salt(body: object) -> None:
    """Note what a parsed body says. What is no salt gets vLLM's 400, wherever vLLM looks at it."""
    salt = body.get("cache_salt") if isinstance(body, dict) else None
    current_salt.set(salt if isinstance(salt, str) else None)


def current_partition() -> Partition:
    """The partition of the request that this task works on."""
    return partition_of(current_salt.get(), current_tenant.get() if tenants_apart.get() else "")


def salt_of_blocks(salt: str | None) -> str | None:
    """The salt for the block hashes of this task's request.

    Args:
        salt: of its rendered prompt.

    Raises:
        SaltLostError: its media were kept under another.
    """
    if salt is not None and salt != current_salt.get():
        raise SaltLostError("the request's cache_salt came too late to keep its media apart")
    return current_partition() if tenants_apart.get() else salt
