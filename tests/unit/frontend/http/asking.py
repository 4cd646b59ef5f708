"""Whose request the code under test works on, as the HTTP layers would have said it."""

from collections.abc import Iterator
from contextlib import contextmanager

from frontend.tenancy.cache_salt import current_salt, tenants_apart
from frontend.tenancy.tenant import Tenant, current_tenant


@contextmanager
def asking(*, key: str = "", salt: str | None = None, apart: bool = False) -> Iterator[None]:
    """Ask with an API key and a ``cache_salt``; ``apart`` isolates keys from each other."""
    tokens = (current_tenant.set(Tenant(key)), current_salt.set(salt), tenants_apart.set(apart))
    try:
        yield
    finally:
        current_tenant.reset(tokens[0])
        current_salt.reset(tokens[1])
        tenants_apart.reset(tokens[2])
