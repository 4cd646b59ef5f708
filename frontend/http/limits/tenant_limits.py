"""Limits of one API key on shared resources: an amount, or concurrent engine calls."""

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
"""One request may take a fraction 1 / ``SHARE`` of the slots."""

CALLS_AT_ONCE: Final = 16
"""Calls that start before the event loop gets a turn. Each takes a millisecond of it. A thousand at
once, as 20 beam searches make at each token, delayed other requests by over a second."""


class TenantQuota:
    """Track usage of a shared amount, of which one API key may take a part only."""

    def __init__(self, what: str, total: int, of_one: int) -> None:
        """``what`` names the amount in messages; ``of_one`` is the limit of one tenant."""
        self._what = what
        self._total = total
        self._of_one = of_one
        self._taken: Counter[Tenant] = Counter()
        self.taken = 0

    def check(self, tenant: Tenant, amount: int = 1) -> None:
        """Raise OverloadedError unless so much is left, in total and for this tenant."""
        if self.taken + amount > self._total:
            raise OverloadedError(f"this frontend has no room for more {self._what}: {_LATER}")
        if self._taken[tenant] + amount > self._of_one:
            raise OverloadedError(f"this API key has its share of {self._what}: {_LATER}")

    def take(self, tenant: Tenant, amount: int = 1) -> None:
        """Take an amount, or raise OverloadedError and take nothing."""
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

    vLLM's server makes a call for each prompt of a request, thousands on some routes. Each call
    takes a slot, of which there are as many as requests in flight.
    """

    def __init__(self, places: int, of_a_tenant: int) -> None:
        """``of_a_tenant`` is the number of slots that one tenant may have."""
        self._own = max(1, places // SHARE)
        self._of_a_tenant = of_a_tenant
        self._shared = asyncio.Semaphore(places)
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
        self._tenants: WeakValueDictionary[Tenant, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def of_request(
        self, request: RequestContext, keep: Callable[[int], None] | None = None
    ) -> Iterator[None]:
        """Count the calls of a request; for ``keep`` see :class:`frontend.request.Batch`."""
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
