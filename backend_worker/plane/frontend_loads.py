"""Count requests and tokens of each frontend on each rank, as routers count their own. No I/O.

A router needs the load of the other frontends. Subtracting its own count from the engine's metrics
would be wrong while requests are in transit; this count is exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Share(NamedTuple):
    """Load on one rank: requests in flight, each choice as one, prefill tokens of requests without
    an output, and prompt tokens of requests with one."""

    active: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(slots=True)
class _Sum:
    active: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    def add(self, active: int, prefill_tokens: int, decode_tokens: int) -> None:
        self.active += active
        self.prefill_tokens += prefill_tokens
        self.decode_tokens += decode_tokens


class FrontendLoads:
    """Accounts of all frontends, and their sums per rank."""

    def __init__(self, ranks: Sequence[int], changed: Callable[[], object]) -> None:
        self.ranks = tuple(ranks)
        self.sums = {rank: _Sum() for rank in ranks}
        self.changes = 0
        self.changed = changed

    def open(self) -> "Account":
        return Account(self)

    def least_busy(self) -> int:
        """Return the rank with the fewest requests, for a request that names none."""
        return min(self.ranks, key=lambda rank: (self.sums[rank].active, rank))


class Account:
    """Load of one frontend. Close it by ending its requests: a running one still loads the rank."""

    def __init__(self, loads: FrontendLoads) -> None:
        self._loads = loads
        self._sums = {rank: _Sum() for rank in loads.ranks}
        self._changes = 0
        self._told = 0

    def started(
        self, rank: int, prefill_tokens: int, prompt_tokens: int, choices: int = 1
    ) -> "Entry":
        """Add a request: prefill tokens count until its first output, prompt tokens after it."""
        return Entry(self, rank, prefill_tokens, prompt_tokens, choices)

    def others(self) -> dict[int, Share]:
        return {
            rank: Share(
                total.active - own.active,
                total.prefill_tokens - own.prefill_tokens,
                total.decode_tokens - own.decode_tokens,
            )
            for (rank, total), own in zip(
                self._loads.sums.items(), self._sums.values(), strict=True
            )
        }

    @property
    def has_news(self) -> bool:
        """Whether other frontends changed anything since :meth:`told`."""
        return self._loads.changes - self._changes != self._told

    def told(self) -> None:
        """Note that the frontend was sent the load of the others."""
        self._told = self._loads.changes - self._changes

    def add(self, rank: int, active: int, prefill_tokens: int, decode_tokens: int) -> None:
        self._sums[rank].add(active, prefill_tokens, decode_tokens)
        self._loads.sums[rank].add(active, prefill_tokens, decode_tokens)
        self._changes += 1
        self._loads.changes += 1
        self._loads.changed()


class Entry:
    """One request on an account, from its arrival to its end."""

    def __init__(
        self, account: Account, rank: int, prefill_tokens: int, prompt_tokens: int, choices: int
    ) -> None:
        self._account = account
        self._rank = rank
        self._prefill_tokens = prefill_tokens
        self._prompt_tokens = prompt_tokens
        self._choices = choices
        self._decoding = False
        self._ended = False
        account.add(rank, choices, prefill_tokens, 0)

    def first_output(self) -> None:
        """Move the request from prefill to decode. Later calls do nothing."""
        if self._decoding or self._ended:
            return
        self._decoding = True
        self._account.add(self._rank, 0, -self._prefill_tokens, self._prompt_tokens)

    def ended(self) -> None:
        """Remove the request, however it ended. Later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        if self._decoding:
            self._account.add(self._rank, -self._choices, 0, -self._prompt_tokens)
        else:
            self._account.add(self._rank, -self._choices, -self._prefill_tokens, 0)
