"""Whose request the code under test works on, as the HTTP layers would have said it."""

from collections.abc import Iterator
from contextlib import contextmanager

from frontend.request_context import Tenant, begin


@contextmanager
def asking(*, key: str = "", salt: str | None = None, apart: bool = False) -> Iterator[None]:
    """Ask with an API key and a ``cache_salt``; ``apart`` isolates keys from each other."""
    context = begin()
    context.tenant, context.isolated, context.salt = Tenant(key), apart, salt
    yield
    begin()
