"""Whose request is being served: every API key is a tenant of its own.

A context variable, since vLLM's own code stands between the HTTP server, which sees the
key, and those who keep tenants apart.
"""

from contextvars import ContextVar
from typing import Final, NewType

Tenant = NewType("Tenant", str)
"""Names an API key without telling it: a digest."""

EVERYBODY: Final = Tenant("")
"""The one tenant of a frontend without API keys."""

current_tenant: Final[ContextVar[Tenant]] = ContextVar("tenant", default=EVERYBODY)
"""The tenant of the request that this task works on."""
