"""What is known of the HTTP request that a task works on: one object in one context variable.

vLLM's own code stands between the HTTP server, which learns most of it, and those who need it. All
tasks that are begun for a request share its object.
"""

import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, NewType, TypeVar

from common.errors import SaltLostError
from common.media.cache_partition import Partition, partition_of

Tenant = NewType("Tenant", str)
"""Names an API key without telling it: a digest."""

EVERYBODY: Final = Tenant("")
"""The one tenant of a frontend without API keys."""

_Part = TypeVar("_Part")


@dataclass(eq=False)
class RequestContext:
    """What is known of a request.

    Attributes:
        tenant: whose it is: every API key is a tenant of its own.
        peer: address of the host that sent it, a proxy perhaps.
        isolated: whether each tenant's salts are its own, and having none is a salt
            (``--isolate-api-keys``).
        salt: ``cache_salt`` of its body, None if it says nothing.
        arrived: when it was there as a whole, by ``time.perf_counter``.
        engine_calls: numbers the engine's calls that are made for it.
        defers: whether its model wants media fetched and not decoded; None where there is one
            model, whose processing has told the loader.
        failed: whether a call of an engine ended with an error, perhaps after the answer had begun.
    """

    tenant: Tenant = EVERYBODY
    peer: str = ""
    isolated: bool = False
    salt: str | None = None
    arrived: float | None = None
    engine_calls: Iterator[int] = field(default_factory=itertools.count)
    defers: bool | None = None
    failed: bool = False
    _parts: dict[type, object] = field(default_factory=dict)

    def put(self, part: object) -> None:
        """Keep an object that belongs to the request, in the place of one of its type."""
        self._parts[type(part)] = part

    def find(self, kind: type[_Part]) -> _Part | None:
        part = self._parts.get(kind)
        return part if isinstance(part, kind) else None

    def note_salt(self, body: object) -> None:
        """Note the salt that a parsed body says, whichever of vLLM's routes it is for.

        vLLM knows it once a prompt is rendered; media are fetched and processed before that. What
        is no salt gets vLLM's 400, wherever vLLM looks at it.
        """
        salt = body.get("cache_salt") if isinstance(body, dict) else None
        self.salt = salt if isinstance(salt, str) else None


_current: Final[ContextVar[RequestContext | None]] = ContextVar("request context", default=None)


def begin() -> RequestContext:
    """Begin a request in this task. Whatever the task did before is forgotten: a client's next
    request may start in the task of its last.
    """
    context = RequestContext()
    _current.set(context)
    return context


def current_context() -> RequestContext:
    """Return what is known of the request that this task works on: nothing if it works on none."""
    return _current.get() or RequestContext()


def current_partition() -> Partition:
    request = current_context()
    return partition_of(request.salt, request.tenant if request.isolated else "")


def salt_of_blocks(salt: str | None) -> str | None:
    """Return the salt for this task's block hashes, given that of its rendered prompt. Raises
    SaltLostError if its media were kept under another.
    """
    request = current_context()
    if salt is not None and salt != request.salt:
        raise SaltLostError("the request's cache_salt came too late to keep its media apart")
    return current_partition() if request.isolated else salt
