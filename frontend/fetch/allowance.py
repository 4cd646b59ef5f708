"""What one HTTP request may ask for: so many media, so many bytes, so many pixels.

It is a part of the request's context, since vLLM makes a connector for each message of a request
and knows of no place that is the request's own.
"""

import asyncio
import threading
from typing import Final

from frontend.asgi import Arrival
from frontend.media_limits import MEGAPIXEL, MIB, Budget, FetchPolicy, RequestLimitError
from frontend.request_context import current_context

MAX_FETCHES: Final = 16
"""URLs of one request that are fetched, and names that are looked up for it, at once: the frontend
has 256 connections and threads for all."""


class RequestAllowance:
    """What is left for a request: it is about all its media together, also those that are
    done. For any thread.

    Attributes:
        fetches: slots for URLs that are fetched at once. For the frontend's event loop.
    """

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._media = 0
        self._bytes = 0
        self._pixels = 0
        self._lookups = 0
        self._lock = threading.Lock()
        self.fetches = asyncio.Semaphore(MAX_FETCHES)

    def take_medium(self) -> int:
        """Count a medium; return its number. Raises RequestLimitError if it is one too many."""
        with self._lock:
            self._media += 1
            number = self._media
        if number > self._policy.max_per_request:
            raise RequestLimitError(
                f"a request may have {self._policy.max_per_request} media at most"
            )
        return number

    def take_lookup(self) -> bool:
        """Say whether the name of another host may be looked up, and count it if so."""
        with self._lock:
            allowed = self._lookups < MAX_FETCHES
            self._lookups += allowed
        return allowed

    def return_lookup(self) -> None:
        with self._lock:
            self._lookups -= 1

    def take_bytes(self, count: int) -> None:
        """Count bytes of encoded media. Raises RequestLimitError if they are too many."""
        most = self._policy.max_request_bytes
        with self._lock:
            self._bytes += count
            enough = self._bytes <= most
        if not enough:
            raise RequestLimitError(
                f"the media of one request may have {most / MIB:g} MiB together at most"
            )

    def return_bytes(self, count: int) -> None:
        """Bytes that were counted are gone, since they have to be fetched again."""
        with self._lock:
            self._bytes -= count

    def take_pixels(self, count: int) -> None:
        """Count pixels to decode. Raises RequestLimitError if they are too many."""
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
        """Pixels that were counted are gone, since they have to be decoded again."""
        with self._lock:
            self._pixels -= count


class HeldBytes:
    """The encoded bytes of one medium while they arrive, and for as long as they are kept."""

    def __init__(self, allowance: RequestAllowance, budget: Budget) -> None:
        """
        Args:
            allowance: of the request that asked for them first.
            budget: of the process.
        """
        self._allowance = allowance
        self._reservation = budget.reserve()
        self._count = 0

    def grow(self, count: int) -> None:
        """So many more are about to be there.

        Raises:
            RequestLimitError: more than the request may ask for.
            RefusedError, OverloadedError: see :meth:`Budget.reserve`.
        """
        self._count += count
        self._allowance.take_bytes(count)
        self._reservation.grow(count)

    def grow_to(self, count: int) -> None:
        """There are so many in all. Raises as :meth:`grow`."""
        self.grow(max(0, count - self._count))

    def drop(self) -> None:
        """They were thrown away."""
        self._allowance.return_bytes(self._count)
        self._count = 0
        self._reservation.release()

    def keep_with(self, owner: object) -> None:
        """They are kept until an object is gone."""
        self._reservation.keep_with(owner)


def current_allowance(policy: FetchPolicy) -> RequestAllowance:
    """That of the request that this task works on, a new one if it works on none."""
    return current_context().find(RequestAllowance) or RequestAllowance(policy)


async def allow_media(arrival: Arrival, *, policy: FetchPolicy) -> None:
    """Give a request its allowance."""
    arrival.context.put(RequestAllowance(policy))
