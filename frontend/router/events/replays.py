"""Ask for what was missed: one question at a time, and what its answer brings."""

import logging
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from common.backoff import Backoff
from frontend.router.event_wire import EventBatch, MalformedEventError
from frontend.router.events.progress import Progress, Watch

logger = logging.getLogger(__name__)


class Replay(NamedTuple):
    """Ask the worker for its events from a number on, over a connection of its own.

    Every message of the answer goes to :meth:`EventStream.on_replayed` with the
    attempt's number; an attempt that fails or takes too long, to
    :meth:`EventStream.on_replay_failed`. An earlier attempt is given up.
    """

    attempt: int
    start: int


class Resubscribe(NamedTuple):
    """Replace the live connection, which brings nothing although there is something."""


Command: TypeAlias = Replay | Resubscribe


WAITING_BYTES = 64 << 20
"""Live messages kept while a replay runs; beyond it they are replayed instead."""


class WaitingMessage(NamedTuple):
    """A live message, with the number of the last replay that had been asked for when it came."""

    sequence: int
    payload: bytes
    attempt: int


class WaitingRoom:
    """Keeps messages in order, up to a limit for all payloads together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._messages: list[WaitingMessage] = []
        self._bytes = 0
        self._overflowed = False

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: WaitingMessage) -> None:
        """Keep a message. One too many, and all are thrown away, those to come too."""
        size = len(message.payload)
        if self._bytes + size > self._limit_bytes:
            self.empty()
            self._overflowed = True
        if not self._overflowed:
            self._messages.append(message)
            self._bytes += size

    def empty(self) -> list[WaitingMessage]:
        messages, self._messages = self._messages, []
        self._bytes = 0
        return messages

    def overflow_noticed(self) -> bool:
        """Whether messages were thrown away; from now on they are kept again."""
        overflowed, self._overflowed = self._overflowed, False
        return overflowed


BELIEVED_EVENTS = 500
"""Events in an answer up to which its end is believed. vLLM's socket drops what exceeds
its send limit of 1,000 messages, and may still deliver the end."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
"""Before asking again a replay endpoint that did not answer."""


@dataclass(slots=True)
class _Attempt:
    """One replay.

    Attributes:
        number: tells its answer from that of an earlier one.
        verify: whether its first message must be the last event we applied.
        accept_loss: whether a missing event is gone rather than dropped on the way.
        rescue: whether live events go on until it answers.
        answered, hole: whether a message came, an event was missing.
        applied: events applied.
    """

    number: int = 0
    verify: bool = False
    accept_loss: bool = False
    rescue: bool = False
    answered: bool = False
    hole: bool = False
    applied: int = 0


class Replays:
    """The questions of one stream, and the answer to the last; up to ``believed_events`` in an
    answer its end is believed.
    """

    def __init__(self, progress: Progress, watch: Watch, believed_events: int) -> None:
        self._progress = progress
        self._watch = watch
        self._believed_events = believed_events
        self._attempt = _Attempt()
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._retry_at: float | None = None

    # The question

    def ask(self, *, accept_loss: bool = False) -> Replay:
        """Ask for everything after the last event applied, and for that one as proof."""
        verify = self._progress.provable
        start = self._progress.expected - verify
        return self._ask(start, _Attempt(verify=verify, accept_loss=accept_loss))

    def ask_for_rescue(self) -> Replay:
        """Ask for everything, of an endpoint that may still not answer."""
        return self._ask(0, _Attempt(rescue=True))

    def _ask(self, start: int, attempt: _Attempt) -> Replay:
        self._progress.counters.replays += 1
        attempt.number = self._attempt.number + 1
        self._attempt = attempt
        return Replay(attempt.number, start)

    @property
    def number(self) -> int:
        return self._attempt.number

    # The answer

    @property
    def applied(self) -> int:
        return self._attempt.applied

    @property
    def rescue(self) -> bool:
        """Whether this is the answer to :meth:`ask_for_rescue`, and it has not begun."""
        return self._attempt.rescue

    def begin_rescue(self) -> None:
        self._attempt.rescue = False

    def take(self, sequence: int, payload: bytes, now: float) -> bool:
        """Apply a message of the answer if it is the next; return False if it shows that the
        worker started over.
        """
        attempt, progress = self._attempt, self._progress
        first, attempt.answered = not attempt.answered, True
        expected = progress.expected
        if attempt.verify and first and sequence == expected - 1:
            return progress.proves(payload)
        if sequence < expected:
            self._progress.counters.duplicates += 1
            return True
        # A first message this high means that the buffer begins there: what we had before
        # it can't be told from the events of another run any more.
        late = first and sequence >= expected + (not attempt.verify)
        batch = progress.read(payload)
        if sequence > expected or late:
            self._leap(sequence, batch, late=late)
        if sequence == progress.expected:
            self._apply(sequence, payload, batch, now)
        return True

    def _leap(self, sequence: int, batch: EventBatch | None, *, late: bool) -> None:
        """Decide what follows from events that the answer leaves out."""
        attempt = self._attempt
        if batch is not None and batch.begins_anew:
            attempt.hole = False
            self._progress.skip_to(sequence)
        elif late or attempt.accept_loss:
            attempt.accept_loss = False
            self._progress.lose(f"events before {sequence} are no longer replayed", sequence)
        else:
            attempt.hole = True

    def _apply(self, sequence: int, payload: bytes, batch: EventBatch | None, now: float) -> None:
        self._attempt.applied += 1
        self._watch.heard_replayed(now)
        if batch is None:
            self._progress.pass_over(sequence, payload)
        else:
            self._progress.apply(sequence, payload, batch)

    # The end of it

    @property
    def unproven(self) -> bool:
        """Of an answer that ended: whether it has nothing as recent as our last event."""
        return self._attempt.verify and not self._attempt.answered

    def ask_for_rest(self) -> Replay | None:
        """Of an answer that ended: the next question if it may not have been whole."""
        attempt = self._attempt
        if attempt.hole:
            # What exceeds the worker's send limit is dropped: ask for the rest. If the
            # same is missing again, it is gone.
            return self.ask(accept_loss=not attempt.applied)
        if attempt.applied > self._believed_events:
            return self.ask()
        return None

    def whole(self) -> None:
        """The answer ended and was whole: the endpoint can be relied on."""
        self._backoff.reset()

    def account_for(self, sequence: int) -> bool:
        """Compare a whole answer with an event that came before the question; return whether
        the event exists but the answer ended before it.
        """
        if sequence < self._progress.expected:
            self._progress.counters.duplicates += 1
            return False
        if self._attempt.applied:
            return True
        # Asking again brought nothing new, so there is no such event.
        self._progress.count(MalformedEventError("sequence", f"number {sequence}"))
        return False

    # When there is none

    def failed(self) -> float:
        """Return how long to wait before asking again, in seconds, since no answer came."""
        return self._backoff.next_s()

    def retry_at(self, moment: float) -> None:
        self._retry_at = moment

    def retry_due(self, now: float) -> bool:
        """Whether it is time to ask again; true once."""
        if self._retry_at is None or now < self._retry_at:
            return False
        self._retry_at = None
        return True
