"""Limit what an API key takes of what all requests share: an amount, or engine calls at once."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakValueDictionary

from common.errors import OverloadedError
from frontend.request import Batch
from frontend.request_context import RequestContext, Tenant

_LATER = "try again later"

SHARE: Final = 4
"""Of the places, one request may have this part."""

CALLS_AT_ONCE: Final = 16
"""A call takes a millisecond of the event loop until a worker has it. A thousand that came at once,
as those of 20 beam searches do at each token, kept others waiting for more than a second."""


class TenantQuota:
    """Track usage of a shared amount, of which one API key may take a part only."""

    def __init__(self, what: str, total: int, of_one: int) -> None:
        """
        Args:
            what: is taken, as part of a sentence.
            total: of all together.
            of_one: of one tenant.
        """
        self._what = what
        self._total = total
        self._of_one = of_one
        self._taken: Counter[Tenant] = Counter()
        self.taken = 0

    def check(self, tenant: Tenant, amount: int = 1) -> None:
        """Raise OverloadedError unless there is so much left, altogether and for this tenant."""
        if self.taken + amount > self._total:
            raise OverloadedError(f"this frontend has no room for more {self._what}: {_LATER}")
        if self._taken[tenant] + amount > self._of_one:
            raise OverloadedError(f"this API key has its share of {self._what}: {_LATER}")

    def take(self, tenant: Tenant, amount: int = 1) -> None:
        """Raise OverloadedError, and take nothing, if there isn't so much left."""
        self.check(tenant, amount)
        self.taken += amount
        self._taken[tenant] += amount

    def give_back(self, tenant: Tenant, amount: int = 1) -> None:
        self.taken -= amount
        self._taken[tenant] -= amount
        if not self._taken[tenant]:
            del self._taken[tenant]


class CallLimit:
    """Limit concurrent engine calls of all requests.

    vLLM's server asks its engine once for each prompt of a request, and some routes take thousands.
    Each of these calls has a place, of which there are as many as requests in flight.
    """

    def __init__(self, places: int, of_a_tenant: int) -> None:
        """
        Args:
            of_a_tenant: of these one may have.
        """
        self._own = max(1, places // SHARE)
        self._of_a_tenant = of_a_tenant
        self._shared = asyncio.Semaphore(places)
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
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
        places = (asyncio.Semaphore(self._own), of_tenant, self._shared)
        request.put(Batch(places, keep, turns=self._turns))
        try:
            yield
        finally:
            if before is not None:
                request.put(before)
