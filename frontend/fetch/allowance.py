"""Limits of one HTTP request: media, bytes and pixels.

Part of the request's context, since vLLM makes a connector for each message of a request and has no
place that is the request's own.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Final

from frontend.asgi import Arrival
from frontend.media_limits import MEGAPIXEL, MIB, Budget, FetchPolicy, RequestLimitError
from frontend.request_context import current_context

MAX_FETCHES: Final = 16
"""Concurrent fetches, and name look-ups, of one request: the frontend has 256 connections and
threads for all."""

MAX_DECODES: Final = 4
"""Concurrent decodes of one request, half of the threads: the largest picture takes one for
seconds. Temporary copies of large pictures have a budget of their own."""


class RequestAllowance:
    """Remaining allowance of a request, for all its media together, finished ones included.
    Thread-safe.

    ``fetches`` and ``decodes`` hold slots for concurrent ones; they belong to the frontend's event
    loop.
    ``client`` is whose shares of budgets its media take.
    ``failure`` makes the first error about one of its media: vLLM waits for all of them, so those
    that were not begun fail with it.
    """

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self.client = current_context().client
        self._media = 0
        self._bytes = 0
        self._pixels = 0
        self._lookups = 0
        self._lock = threading.Lock()
        self.fetches = asyncio.Semaphore(MAX_FETCHES)
        self.decodes = asyncio.Semaphore(MAX_DECODES)
        self.failure: Callable[[], Exception] | None = None

    def take_medium(self) -> int:
        """Count a medium; return its number. Raises RequestLimitError."""
        with self._lock:
            self._media += 1
            number = self._media
        if number > self._policy.max_per_request:
            raise RequestLimitError(
                f"a request may have {self._policy.max_per_request} media at most"
            )
        return number

    def take_lookup(self) -> bool:
        """Count a look-up of another host's name; return whether it is allowed."""
        with self._lock:
            allowed = self._lookups < MAX_FETCHES
            self._lookups += allowed
        return allowed

    def return_lookup(self) -> None:
        with self._lock:
            self._lookups -= 1

    def take_bytes(self, count: int) -> None:
        """Count bytes of encoded media. Raises RequestLimitError."""
        most = self._policy.max_request_bytes
        with self._lock:
            self._bytes += count
            enough = self._bytes <= most
        if not enough:
            raise RequestLimitError(
                f"the media of one request may have {most / MIB:g} MiB together at most"
            )

    def return_bytes(self, count: int) -> None:
        """Give back counted bytes that must be fetched again."""
        with self._lock:
            self._bytes -= count

    def take_pixels(self, count: int) -> None:
        """Count pixels to decode. Raises RequestLimitError."""
        most = self._policy.max_request_pixels
        with self._lock:
            self._pixels += count
            enough = self._pixels <= most
        if not enough:
            raise RequestLimitError(
                f"the media of one request may have {most / MEGAPIXEL:g} megapixels "
                "together at most, decoded"
            )

    def return_pixels(self, count: int) -> None:
        """Give back counted pixels that must be decoded again."""
        with self._lock:
            self._pixels -= count


class HeldBytes:
    """Encoded bytes of one medium while they arrive, and as long as they are kept."""

    def __init__(self, allowance: RequestAllowance, budget: Budget) -> None:
        """Charge the first request's ``allowance`` and the process's ``budget``."""
        self._allowance = allowance
        self._reservation = budget.reserve(client=allowance.client)
        self._count = 0

    def grow(self, count: int) -> None:
        """Count bytes before they arrive. Raises RequestLimitError and the errors of
        :meth:`Budget.reserve`.
        """
        self._count += count
        self._allowance.take_bytes(count)
        self._reservation.grow(count)

    def grow_to(self, count: int) -> None:
        """Grow to a total. Raises as :meth:`grow`."""
        self.grow(max(0, count - self._count))

    def drop(self) -> None:
        """Release all: the bytes were thrown away."""
        self._allowance.return_bytes(self._count)
        self._count = 0
        self._reservation.release()

    def keep_with(self, owner: object) -> None:
        """Release the budget when ``owner`` is garbage collected."""
        self._reservation.keep_with(owner)


def current_allowance(policy: FetchPolicy) -> RequestAllowance:
    """Return the allowance of the current request, or a new one outside of requests."""
    return current_context().find(RequestAllowance) or RequestAllowance(policy)


async def allow_media(arrival: Arrival, *, policy: FetchPolicy) -> None:
    arrival.context.put(RequestAllowance(policy))
