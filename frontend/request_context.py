"""State of the HTTP request that a task works on: one object in one context variable.

vLLM's code stands between the HTTP server, which learns most of it, and its readers. All tasks
started for a request share its object.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Final, NewType, TypeVar

from common.errors import SaltLostError
from common.media.cache_partition import Partition, partition_of

Tenant = NewType("Tenant", str)
"""Digest of an API key, which identifies it without revealing it."""

EVERYBODY: Final = Tenant("")
"""The only tenant of a frontend without API keys."""

_Part = TypeVar("_Part")


@dataclass(eq=False)
class RequestContext:
    """State of one HTTP request.

    Attributes:
        peer: address of the host that sent it, perhaps a proxy.
        isolated: whether tenants never share a cache salt, not even the empty one
            (``--isolate-api-keys``).
        salt: ``cache_salt`` of its body; None if absent.
        arrived: ``time.perf_counter`` when its body was complete.
        engine_calls: numbers its engine calls.
        defers: whether its model wants media fetched and not decoded; None where there is one
            model, whose processing has told the loader.
        failed: whether an engine call failed, perhaps after the answer had begun.
        held: closed in reverse order when the request ends.
    """

    tenant: Tenant = EVERYBODY
    peer: str = ""
    isolated: bool = False
    salt: str | None = None
    arrived: float | None = None
    engine_calls: Iterator[int] = field(default_factory=itertools.count)
    defers: bool | None = None
    failed: bool = False
    held: ExitStack = field(default_factory=ExitStack)
    _parts: dict[type, object] = field(default_factory=dict)

    @property
    def client(self) -> str:
        """The API key's tenant; without keys the host, or an IPv6 host's network."""
        if self.tenant:
            return self.tenant
        try:
            address = IPv6Address(self.peer)
        except ValueError:  # of IPv4, or none
            return self.peer
        return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))

    def put(self, part: object) -> None:
        """Keep an object that belongs to the request, replacing one of its type."""
        self._parts[type(part)] = part

    def find(self, kind: type[_Part]) -> _Part | None:
        part = self._parts.get(kind)
        return part if isinstance(part, kind) else None

    def note_salt(self, body: object) -> None:
        """Note the ``cache_salt`` of a parsed body, for any of vLLM's routes.

        vLLM knows it once a prompt is rendered; media are fetched and processed before that. vLLM
        answers 400 to a salt of a wrong type.
        """
        salt = body.get("cache_salt") if isinstance(body, dict) else None
        self.salt = salt if isinstance(salt, str) else None


_current: Final[ContextVar[RequestContext | None]] = ContextVar("request context", default=None)


def begin() -> RequestContext:
    """Start an empty context: a client's next request may run in the task of its last."""
    context = RequestContext()
    _current.set(context)
    return context


def current_context() -> RequestContext:
    """Return the context of this task's request; an empty one if there is no request."""
    return _current.get() or RequestContext()


def current_partition() -> Partition:
    request = current_context()
    return partition_of(request.salt, request.tenant if request.isolated else "")


def salt_of_blocks(salt: str | None) -> str | None:
    """Return the salt of block hashes. Raises SaltLostError if media were kept under another."""
    request = current_context()
    if salt is not None and salt != request.salt:
        raise SaltLostError("the request's cache_salt came too late to keep its media apart")
    return current_partition() if request.isolated else salt
