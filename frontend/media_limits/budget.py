"""Process-wide budgets, shared by all requests.

A reservation is released by name or with the object that it was made for. So no exit path leaks it,
even if the object outlives its request in a queue or a thread.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

from common.aio.cleanup import Released
from common.errors import OverloadedError
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

    def __init__(self, total: int, unit: int, what: str) -> None:
        """Limit reservations to ``total``; messages show ``total / unit`` followed by ``what``."""
        self._total = total
        self._unit = unit
        self._what = what
        self._reserved = 0
        self._lock = threading.Lock()
        # Released without the lock: the garbage collector may do it in a thread that holds it.
        self._returned: deque[int] = deque()

    @property
    def reserved(self) -> int:
        with self._lock:
            return self._settled()

    def reserve(self, amount: int = 0) -> "Reservation":
        """Reserve an amount, which can grow.

        Raises:
            RefusedError: it exceeds the whole budget; 400.
            OverloadedError: it exceeds the free part; 429.
        """
        reservation = Reservation(self)
        reservation.grow(amount)
        return reservation

    def _take(self, amount: int, held: int) -> None:
        with self._lock:
            reserved = self._settled()
            fits = reserved + amount <= self._total
            if fits:
                self._reserved = reserved + amount
        if fits or amount == 0:
            return
        if held + amount > self._total:
            raise RefusedError(
                f"it takes more than {self._total / self._unit:g} {self._what}, "
                "which is more than this server has"
            )
        raise OverloadedError(
            f"requests take up all {self._total / self._unit:g} {self._what} "
            "that this server has: try again later"
        )

    def _settled(self) -> int:
        while self._returned:
            self._reserved -= self._returned.popleft()
        return self._reserved


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
        return cls(
            Budget(policy.held_bytes, MIB, "MiB for encoded media"),
            Budget(policy.decoding_pixels, MEGAPIXEL, "megapixels for decoded media"),
            Copies(policy.decoding_pixels // 4),
            Copies(policy.decoding_pixels // 4),
        )


class Reservation(Released):
    """Part of a budget, released at the latest when it is garbage collected."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._amount = 0

    def grow(self, amount: int) -> None:
        """Reserve more. Raises the errors of :meth:`Budget.reserve`, keeping the present amount."""
        self._budget._take(amount, self._amount)
        self._amount += amount

    def release(self) -> None:
        """Release all of it. Idempotent."""
        amount, self._amount = self._amount, 0
        if amount:
            self._budget._returned.append(amount)

    def keep_with(self, owner: object) -> None:
        """Release it when ``owner`` is garbage collected."""
        weakref.finalize(owner, self.release).atexit = False

    def moved_to(self, owner: object) -> "Reservation":
        """Move all of it to a new reservation, released when ``owner`` is garbage collected."""
        moved = Reservation(self._budget)
        moved._amount, self._amount = self._amount, 0
        if moved._amount:
            moved.keep_with(owner)
        return moved

    def __del__(self) -> None:
        self.release()
