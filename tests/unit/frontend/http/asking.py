"""Whose request the code under test works on, as the HTTP layers would have said it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from frontend.request_context import RequestContext, Tenant, _current


def asking(
    *, key: str = "", salt: str | None = None, apart: bool = False
) -> AbstractContextManager[None]:
    """Ask with an API key and a ``cache_salt``; ``apart`` isolates keys from each other."""
    return working_on(RequestContext(tenant=Tenant(key), isolated=apart, salt=salt))


@contextmanager
def working_on(request: RequestContext | None) -> Iterator[None]:
    token = _current.set(request)
    try:
        yield
    finally:
        _current.reset(token)
