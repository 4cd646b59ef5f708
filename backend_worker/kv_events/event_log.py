"""What one rank has published: its last batches, and what all before them add up to.

A reader that misses more than a few batches gets a *snapshot*: batches of KV events of which the
first says that the cache was emptied, and all together store what the engine then holds. They
bear the numbers just before that of the next real batch, so that a reader goes on from there.
The newest batch is never part of a snapshot but follows it, since readers tell one run of an
engine from another by the last batch that they have.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from backend_worker.kv_events.event_snapshot import Batch, fold, retell
from backend_worker.kv_events.held_blocks import HeldBlocks

logger = logging.getLogger(__name__)

Message = tuple[int, bytes]
"""Number and payload of a batch."""

REPLAYED = 400
"""Batches that are replayed one by one. Who misses more is told faster by a snapshot."""

LEAST_KEPT = 64
"""Batches kept however few the operator asks for: a snapshot needs some numbers to bear."""

_MOST_MESSAGES = 256
"""Of a snapshot."""

_BLOCKS_PER_MESSAGE = 1000
"""If that makes no more messages: about 35 kB, which a reader applies in a millisecond."""

_MOST_BLOCKS = 1 << 22
"""Beyond it no account is kept."""

_FOLLOWING = 100
"""Batches behind a snapshot up to which it is given to others who ask."""

_FRESH_S = 1.0
"""Until then it is given to others anyway: a limit on how often one is made."""

_KEPT_S = 10.0
"""Until then a snapshot for which nobody asks any more is kept."""


@dataclass(slots=True)
class Snapshot:
    """All that was held at one moment.

    Attributes:
        base: number of the first batch that is not in it.
        rest: makes its payloads; None when all are made.
        payloads: that are made.
        following: batches since, the newest at that moment included.
        used: when it was made, or last given to somebody, in monotonic seconds.
        made: when it was made.
    """

    base: int
    rest: Iterator[bytes] | None
    payloads: list[bytes] = field(default_factory=list)
    following: list[Message] = field(default_factory=list)
    used: float = 0.0
    made: float = 0.0

    def fits(self, start: int) -> bool:
        """Whether its numbers are all above one from which on a reader asks."""
        return self.base - len(self.payloads) > start


class EventLog:
    """The batches of one rank. For one thread, which calls :meth:`work` when it has time.

    Args:
        kept: vLLM's buffer, to which every batch published is added.
        clock: monotonic seconds.
    """

    def __init__(self, kept: deque[Message], clock: Callable[[], float] = time.monotonic) -> None:
        self._kept = kept
        self._clock = clock
        self._held: HeldBlocks | None = HeldBlocks()
        self._last: Batch | None = None
        self._unfolded: deque[tuple[int, Batch]] = deque()
        self._snapshot: Snapshot | None = None
        self._missing = -1
        self._next = 0

    def published(self, number: int, payload: bytes | None, batch: Batch) -> None:
        """A batch was published, and is kept.

        Args:
            payload: None if it could not be published: readers must get on without it.
        """
        self._next = number + 1
        if payload is None:
            self._missing = number
            self._snapshot = None
        elif self._snapshot is not None:
            self._snapshot.following.append((number, payload))
        if self._held is not None:
            self._unfolded.append((number, batch))
            with self._or_give_up():
                self._fold()

    def answer(self, start: int) -> list[Message] | None:
        """What to send to a reader that asks for a number and all after it.

        Returns:
            None if it must be asked again, since a snapshot is not ready: :meth:`work` helps.
        """
        kept = self._kept
        if not kept or start > kept[-1][0]:
            return []
        whole = start >= kept[0][0] and start > self._missing
        few = whole and kept[-1][0] - start < REPLAYED
        if self._last is None or self._held is None or few:
            return [message for message in kept if message[0] >= start]
        snapshot = self._snapshot
        if snapshot is not None and snapshot.rest is not None:
            return None
        if snapshot is None or not self._serves(snapshot, start):
            if self._base - start < 2:  # a snapshot would have no number
                return [message for message in kept if message[0] >= start]
            self._begin(self._held, self._last, start)
            return None
        snapshot.used = self._clock()
        first = snapshot.base - len(snapshot.payloads)
        return [*enumerate(snapshot.payloads, first), *snapshot.following]

    def work(self) -> bool:
        """Make a part of a snapshot, well below a millisecond, or forget one.

        Returns:
            Whether there is more to make.
        """
        snapshot = self._snapshot
        if snapshot is None:
            return False
        if snapshot.rest is None:
            if self._clock() - snapshot.used > _KEPT_S:
                self._snapshot = None
            return False
        with self._or_give_up():
            payload = next(snapshot.rest, None)
        if payload is not None:
            snapshot.payloads.append(payload)
            return True
        snapshot.rest = None
        snapshot.used = snapshot.made = self._clock()
        self._fold()
        return False

    @property
    def _base(self) -> int:
        """Number of the first batch that is not folded."""
        return self._unfolded[0][0] if self._unfolded else self._next

    def _serves(self, snapshot: Snapshot, start: int) -> bool:
        fresh = self._clock() - snapshot.made < _FRESH_S
        return snapshot.fits(start) and (fresh or len(snapshot.following) <= _FOLLOWING)

    def _begin(self, held: HeldBlocks, last: Batch, start: int) -> None:
        """Begin a snapshot, until the end of which nothing is folded."""
        base = self._base
        messages = max(1, min(_MOST_MESSAGES, base - start - 1))
        blocks = max(_BLOCKS_PER_MESSAGE, -(-held.to_tell // messages))
        following = [message for message in self._kept if message[0] >= base]
        self._snapshot = Snapshot(base, retell(held, last, blocks), following=following)

    def _fold(self) -> None:
        """Add all batches but the newest to what is held, unless that is being told."""
        held = self._held
        if held is None or (self._snapshot is not None and self._snapshot.rest is not None):
            return
        unfolded = self._unfolded
        while len(unfolded) > 1 or (unfolded and unfolded[0][0] == self._missing):
            _, self._last = unfolded.popleft()
            fold(held, self._last)
        if len(held) > _MOST_BLOCKS:
            logger.error("more than %d blocks are held: no account is kept of them", _MOST_BLOCKS)
            self._give_up()

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """If this fails, what is held is in doubt."""
        failed = True
        try:
            yield
            failed = False
        finally:
            if failed:
                self._give_up()

    def _give_up(self) -> None:
        """Keep no account any more: what is no longer kept can't be asked for."""
        self._held = self._snapshot = None
        self._unfolded.clear()
