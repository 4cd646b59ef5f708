"""Budgets of the whole process: so much for all requests together, and no more.

What is reserved is given back with the object that it was reserved for, or by name. So
nothing stays reserved on any way out, also where the object outlives the request that asked
for it: in a queue, or in a thread that finishes for nobody.
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
from frontend.media_limits.errors import RefusedError
from frontend.media_limits.policy import FetchPolicy

MIB: Final = 1 << 20
MEGAPIXEL: Final = 1_000_000
SECONDS_PER_MEGAPIXEL: Final = 0.25
"""By which a decoder or a processor may take longer than its limit: several times what it needs."""


COPIES_WAIT_S: Final = 30.0
"""How long a thread waits for its share of copies: large pictures take seconds each."""


def seconds_for(pixels: float) -> float:
    """Return how much longer work on so many pixels may take."""
    return pixels / MEGAPIXEL * SECONDS_PER_MEGAPIXEL


class Budget:
    """So much of one thing. For any thread."""

    def __init__(self, total: int, unit: int, what: str) -> None:
        """
        Args:
            total: the most that may be reserved at the same time.
            unit: what users read ``total`` in, as a divisor.
            what: the unit's name and what it is of, for sentences.
        """
        self._total = total
        self._unit = unit
        self._what = what
        self._reserved = 0
        self._lock = threading.Lock()
        # Given back without the lock: the garbage collector may do it in a thread that has it.
        self._returned: deque[int] = deque()

    @property
    def reserved(self) -> int:
        """How much is reserved now."""
        with self._lock:
            return self._settled()

    def reserve(self, amount: int = 0) -> "Reservation":
        """Reserve some; more can be added.

        Raises:
            RefusedError: it is more than there ever is; 400.
            OverloadedError: it is more than is left at this moment; 429.
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
    """Memory that decoders take for a moment beside what they make. Threads wait for their share.

    Unlike a budget's it comes back by itself, so that one request of many large pictures need not
    fail because of itself.
    """

    def __init__(self, total: int) -> None:
        """
        Args:
            total: the most at the same time; one thread alone may have more.
        """
        self._total = total
        self._taken = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """How many threads wait for a share."""
        return len(self._waiting)

    @contextmanager
    def share(self, amount: int) -> Iterator[None]:
        """Have so much while this is entered; wait for it, first come, first served. Blocks.

        Raises:
            OverloadedError: it was not there in time; 429.
        """
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
    """What all requests may hold of media together.

    Attributes:
        held: encoded bytes, those in the cache aside.
        decoding: pixels that are being decoded, or are decoded and not in the cache.
        copies: pixels of copies that are made while pictures are decoded.
    """

    held: Budget
    decoding: Budget
    copies: Copies

    @classmethod
    def of(cls, policy: FetchPolicy) -> Self:
        """Those of a policy, nothing of them taken."""
        return cls(
            Budget(policy.held_bytes, MIB, "MiB for encoded media"),
            Budget(policy.decoding_pixels, MEGAPIXEL, "megapixels for decoded media"),
            Copies(policy.decoding_pixels // 2),
        )


class Reservation(Released):
    """Part of a budget. Given back when nobody refers to it any more, at the latest."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._amount = 0

    def grow(self, amount: int) -> None:
        """Reserve more. Raises as :meth:`Budget.reserve`, and keeps what it had."""
        self._budget._take(amount, self._amount)
        self._amount += amount

    def release(self) -> None:
        """Give all of it back. May be called twice."""
        amount, self._amount = self._amount, 0
        if amount:
            self._budget._returned.append(amount)

    def keep_with(self, owner: object) -> None:
        """Give it back when an object is gone."""
        weakref.finalize(owner, self.release).atexit = False

    def moved_to(self, owner: object) -> "Reservation":
        """All of it as a reservation that is given back when an object is gone."""
        moved = Reservation(self._budget)
        moved._amount, self._amount = self._amount, 0
        if moved._amount:
            moved.keep_with(owner)
        return moved

    def __del__(self) -> None:
        self.release()
