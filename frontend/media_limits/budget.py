"""Process-wide budgets, shared by all requests.

A reservation is released by name or with the object that it was made for. So no exit path leaks it,
even if the object outlives its request in a queue or a thread.
"""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

from common.aio.cleanup import Released
from common.errors import OverloadedError
from frontend.client_turns import CLIENT_SHARE
from frontend.media_limits.policy import FetchPolicy, RefusedError

MIB: Final = 1 << 20
MEGAPIXEL: Final = 1_000_000
SECONDS_PER_MEGAPIXEL: Final = 0.25
"""Extra time for a decoder or processor beyond its limit: several times its need."""

COPIES_WAIT_S: Final = 30.0
"""Time-out of a thread's wait for its share of copies: large pictures take seconds each."""


def seconds_for(pixels: float) -> float:
    return pixels / MEGAPIXEL * SECONDS_PER_MEGAPIXEL


class Budget:
    """Budget of one resource. Thread-safe."""

    def __init__(self, total: int, unit: int, what: str, of_one: int | None = None) -> None:
        """Limit reservations to ``total``, and to ``of_one`` those of a client; messages show
        ``total / unit`` followed by ``what``.
        """
        self._total = total
        self._unit = unit
        self._what = what
        self._of_one = total if of_one is None else of_one
        self._reserved = 0
        self._clients: Counter[str | None] = Counter()
        self._lock = threading.Lock()
        # Released without the lock: the garbage collector may do it in a thread that holds it.
        self._returned: deque[tuple[str | None, int]] = deque()

    @property
    def reserved(self) -> int:
        with self._lock:
            return self._settled()

    def reserve(self, amount: int = 0, client: str | None = None) -> "Reservation":
        """Reserve an amount, which can grow, for a client if its share is to be limited.

        Raises:
            RefusedError: it exceeds the whole budget; 400.
            OverloadedError: it exceeds the free part, or the client's; 429.
        """
        reservation = Reservation(self, client)
        reservation.grow(amount)
        return reservation

    def _take(self, amount: int, held: int, client: str | None) -> None:
        with self._lock:
            reserved, own = self._settled(), self._clients[client] + amount
            fits = reserved + amount <= self._total and (client is None or own <= self._of_one)
            if fits:
                self._count(client, amount)
        if fits or amount == 0:
            return
        if held + amount > self._total:
            raise RefusedError(
                f"it takes more than {self._total / self._unit:g} {self._what}, "
                "which is more than this server has"
            )
        all_ = f"all {self._total / self._unit:g} {self._what} that this server has"
        if reserved + amount > self._total:
            raise OverloadedError(f"requests take up {all_}: try again later")
        raise OverloadedError(f"this client has its share of {all_}: try again later")

    def _settled(self) -> int:
        while self._returned:
            client, amount = self._returned.popleft()
            self._count(client, -amount)
        return self._reserved

    def _count(self, client: str | None, amount: int) -> None:
        self._reserved += amount
        self._clients[client] += amount
        if not self._clients[client]:
            del self._clients[client]


class Copies:
    """Memory that decoders take briefly beside their output. Threads wait for their share: unlike a
    budget's, it returns by itself, so one request of many large pictures need not fail.
    """

    def __init__(self, total: int) -> None:
        """Limit concurrent shares to ``total``; a single thread may exceed it."""
        self._total = total
        self._taken = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def share(self, amount: int) -> Iterator[None]:
        """Hold a share; block for it in FIFO order. Raises OverloadedError (429) on a time-out."""
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                if not self._changed.wait_for(lambda: self._fits(turn, amount), COPIES_WAIT_S):
                    raise OverloadedError("too many large pictures are decoded: try again later")
                self._taken += amount
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._taken -= amount
                self._changed.notify_all()

    def _fits(self, turn: object, amount: int) -> bool:
        fits = not self._taken or self._taken + amount <= self._total
        return fits and self._waiting[0] is turn


@dataclass(frozen=True)
class MediaBudgets:
    """Budgets for media of all requests together.

    Attributes:
        held: encoded bytes, except those in the cache.
        decoding: pixels being decoded, or decoded and not in the cache.
        copies: pixels of temporary copies of pictures during decoding.
        codecs: pixels of frames that the codecs of films keep: films take long, and no picture
            should wait for them.
    """

    held: Budget
    decoding: Budget
    copies: Copies
    codecs: Copies

    @classmethod
    def of(cls, policy: FetchPolicy) -> Self:
        def budget(total: int, of_request: int, unit: int, what: str) -> Budget:
            return Budget(total, unit, what, max(int(total * CLIENT_SHARE), of_request))

        decoding = policy.decoding_pixels, policy.max_request_pixels
        return cls(
            budget(policy.held_bytes, policy.max_request_bytes, MIB, "MiB for encoded media"),
            budget(*decoding, MEGAPIXEL, "megapixels for decoded media"),
            Copies(policy.decoding_pixels // 4),
            Copies(policy.decoding_pixels // 4),
        )


class Reservation(Released):
    """Part of a budget, released at the latest when it is garbage collected."""

    def __init__(self, budget: Budget, client: str | None = None) -> None:
        self._budget = budget
        self._client = client
        self._amount = 0

    def grow(self, amount: int) -> None:
        """Reserve more. Raises the errors of :meth:`Budget.reserve`, keeping the present amount."""
        self._budget._take(amount, self._amount, self._client)
        self._amount += amount

    def release(self) -> None:
        """Release all of it. Idempotent."""
        amount, self._amount = self._amount, 0
        if amount:
            self._budget._returned.append((self._client, amount))

    def keep_with(self, owner: object) -> None:
        """Release it when ``owner`` is garbage collected."""
        weakref.finalize(owner, self.release).atexit = False

    def moved_to(self, owner: object) -> "Reservation":
        """Move all of it to a new reservation, released when ``owner`` is garbage collected."""
        moved = Reservation(self._budget, self._client)
        moved._amount, self._amount = self._amount, 0
        if moved._amount:
            moved.keep_with(owner)
        return moved

    def __del__(self) -> None:
        self.release()
