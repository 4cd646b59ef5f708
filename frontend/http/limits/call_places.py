"""Limit concurrent engine calls of all requests.

vLLM's server asks its engine once for each prompt of a request, and some routes take thousands.
Each of these calls has a place, of which there are as many as requests in flight.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakValueDictionary

from frontend.request import Batch
from frontend.request_context import RequestContext, Tenant

SHARE: Final = 4
"""Of the places, one request may have this part."""


class CallPlaces:
    """Those of a frontend."""

    def __init__(self, places: int, of_a_tenant: int) -> None:
        """
        Args:
            of_a_tenant: of these one may have.
        """
        self._own = max(1, places // SHARE)
        self._of_a_tenant = of_a_tenant
        self._shared = asyncio.Semaphore(places)
        self._tenants: WeakValueDictionary[Tenant, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def of_request(
        self, request: RequestContext, keep: Callable[[int], None] | None = None
    ) -> Iterator[None]:
        """Count the calls of a request from now on.

        Args:
            keep: see :class:`frontend.request.Batch`.
        """
        of_tenant = self._tenants.get(request.tenant)
        if of_tenant is None:
            of_tenant = self._tenants[request.tenant] = asyncio.Semaphore(self._of_a_tenant)
        before = request.find(Batch)
        request.put(Batch((asyncio.Semaphore(self._own), of_tenant, self._shared), keep))
        try:
            yield
        finally:
            if before is not None:
                request.put(before)
