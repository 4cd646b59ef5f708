"""Limits of one client on shared resources: of an API key, or of a host without one."""

from collections import Counter

from common.errors import OverloadedError

_LATER = "try again later"


class TenantQuota:
    """Track usage of a shared amount, of which one client may take a part only."""

    def __init__(self, what: str, total: int, of_one: int) -> None:
        """``what`` names the amount in messages; ``of_one`` is the limit of one client."""
        self._what = what
        self._total = total
        self._of_one = of_one
        self._taken: Counter[str] = Counter()
        self.taken = 0

    def check(self, client: str, amount: int = 1) -> None:
        """Raise OverloadedError unless so much is left, in total and for this client."""
        if self.taken + amount > self._total:
            raise OverloadedError(f"this frontend has no room for more {self._what}: {_LATER}")
        if self._taken[client] + amount > self._of_one:
            raise OverloadedError(f"this client has its share of {self._what}: {_LATER}")

    def take(self, client: str, amount: int = 1) -> None:
        """Take an amount, or raise OverloadedError and take nothing."""
        self.check(client, amount)
        self.taken += amount
        self._taken[client] += amount

    def give_back(self, client: str, amount: int = 1) -> None:
        self.taken -= amount
        self._taken[client] -= amount
        if not self._taken[client]:
            del self._taken[client]
