"""An amount that all requests share, and of which one API key may take a part only."""

from collections import Counter

from common.errors import OverloadedError
from frontend.request_context import Tenant

_LATER = "try again later"


class TenantQuota:
    """Counts what is taken. Whoever takes gives back."""

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
        """Whether there is so much left.

        Raises:
            OverloadedError: there isn't, altogether or for this tenant.
        """
        if self.taken + amount > self._total:
            raise OverloadedError(f"this frontend has no room for more {self._what}: {_LATER}")
        if self._taken[tenant] + amount > self._of_one:
            raise OverloadedError(f"this API key has its share of {self._what}: {_LATER}")

    def take(self, tenant: Tenant, amount: int = 1) -> None:
        """Take something.

        Raises:
            OverloadedError: there isn't so much left; nothing is taken.
        """
        self.check(tenant, amount)
        self.taken += amount
        self._taken[tenant] += amount

    def give_back(self, tenant: Tenant, amount: int = 1) -> None:
        """Give back what was taken."""
        self.taken -= amount
        self._taken[tenant] -= amount
        if not self._taken[tenant]:
            del self._taken[tenant]
