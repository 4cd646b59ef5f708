"""Whose request the code under test works on, as the HTTP layers would have said it."""

from collections.abc import Iterator
from contextlib import contextmanager

from frontend.request_context import RequestContext, Tenant, _current


@contextmanager
def asking(*, key: str = "", salt: str | None = None, apart: bool = False) -> Iterator[None]:
    """Ask with an API key and a ``cache_salt``; ``apart`` isolates keys from each other."""
    token = _current.set(RequestContext(tenant=Tenant(key), isolated=apart, salt=salt))
    try:
        yield
    finally:
        _current.reset(token)
