"""State machine that follows one rank's KV events by sequence number. No I/O.

Messages and replay answers go in, :class:`Replay` questions come out; :attr:`EventStream.state`
says how far the index can be trusted. The rules:

* A connection leads to one run of a worker's publisher, whose numbers rise by one. On connection,
  ask for a replay from the very first event, and once more when the publisher surely knows the
  subscription. On disconnection, forget everything.
* Each event is applied once and in order. The next number is applied; a lower one is a duplicate; a
  higher one means loss: the blocks are *suspended* and a replay is requested.
* A replay is complete up to the moment of the question: earlier live events can be dropped, later
  ones wait for its end. It leaves out events that the worker no longer has. Then it begins with a
  snapshot, or everything is forgotten: blocks indexed from then on are really held, and earlier
  ones are unknown until the worker clears its cache.
* A worker that serves requests which must have stored blocks, yet sends no event, is asked the same
  question without suspending. Without an answer it is approximate, and asked again later.
* An unreadable message changes nothing. If it stood for an event, the gap shows.

``progress.py`` reads and applies events, ``subscriber.py`` has the sockets, ``index/indexes.py``
the meaning of events.
"""

import logging
import math
import time
from enum import Enum
from typing import Final, NamedTuple

from common.backoff import Backoff
from frontend.router.event_wire import END_OF_REPLAY, MalformedEventError
from frontend.router.events.progress import Progress, StreamStatistics
from frontend.router.index import EXACT, IndexState, TargetBlocks, approximate, degraded

logger = logging.getLogger(__name__)


class Replay(NamedTuple):
    """Request for the worker's events from a number on, over a connection of its own.

    Pass each message of the answer to :meth:`EventStream.on_replayed` with the attempt's number,
    and a failure or time-out to :meth:`EventStream.on_replay_failed`. It supersedes earlier
    attempts.
    """

    attempt: int
    start: int


class Phase(Enum):
    FOLLOWING = "live events are applied as they come"
    REPAIRING = "a replay is needed, blocks are suspended, live events wait"
    CHECKING = "a replay is under way to make sure, live events wait"


SILENCE_S: Final = 2.0
"""Time for which a worker may serve without the expected events before its stream is checked: some
steps of a slow engine."""

SETTLE_S: Final = 0.3
"""Delay after connecting until the publisher surely knows the subscription."""

STRAGGLING_S: Final = 5.0
"""For this long after a worker reported its blocks cleared, events that look older by its clock
count as delayed. Later ones rather mean that its clock was set back."""

WAITING_BYTES: Final = 64 << 20
"""Live messages kept while a replay runs; beyond it they are replayed instead."""

_WAITING_OVERHEAD: Final = 128
"""Bytes of a waiting message beside its payload, which may be empty."""

_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
"""Maximum backoff before asking a silent replay endpoint again."""


class WaitingRoom:
    """Ordered buffer of live messages, with one limit for the bytes of all payloads."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._messages: list[tuple[int, bytes]] = []
        self._bytes = 0
        self.overflowed = False

    def add(self, sequence: int, payload: bytes) -> None:
        """Keep a message. Beyond the limit, drop all messages, later ones included."""
        self._bytes += len(payload) + _WAITING_OVERHEAD
        if self._bytes > self._limit_bytes:
            self.overflowed = True
            self._messages.clear()
        if not self.overflowed:
            self._messages.append((sequence, payload))

    def empty(self) -> list[tuple[int, bytes]]:
        """Return all messages and reset the overflow."""
        messages, self._messages = self._messages, []
        self._bytes, self.overflowed = 0, False
        return messages


class EventStream:
    """State machine of one rank; ``label`` is its name in log lines."""

    def __init__(
        self,
        blocks: TargetBlocks,
        label: str,
        *,
        silence_s: float = SILENCE_S,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self._label = label
        self._blocks = blocks
        self._progress = Progress(blocks, label)
        self._waiting = WaitingRoom(waiting_bytes)
        self._backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        self._connected = False
        self._said = False
        self._closed = False
        self._attempt = 0
        self._ask_at = math.inf
        self._failure = ""
        self._silence_s = silence_s
        self._silent_since = math.inf
        self._last_event = -math.inf
        self._emptied = 0.0
        self._stragglers_until = -math.inf
        self._enter(Phase.REPAIRING, "learning what was stored before we listened")

    # Lifetime

    def close(self) -> None:
        """Ignore all further messages: the worker's incarnation is gone."""
        self._closed = True
        self._waiting.empty()

    def give_up(self, why: str) -> None:
        """Stop using events, for a reason on the frontend's side."""
        if not self._ignores():
            self._progress.give_up(why)
            self._waiting.empty()

    # The connection

    def on_connected(self, now: float) -> Replay | None:
        self._connected = True
        self._said = False
        if self._ignores():
            return None
        # Events published before the subscription is known are missing. Unless a live event shows
        # the gap, the check after a silence finds it.
        self._silent_since = now + SETTLE_S - self._silence_s
        return self._ask()

    def on_disconnected(self) -> None:
        """Forget everything: the next connection may lead to another run."""
        self._connected = False
        if not self._ignores():
            self._attempt += 1  # ignore answers to earlier questions
            self._ask_at = self._silent_since = math.inf
            self._failure = ""
            self._enter(Phase.REPAIRING, "the connection broke")
            self._progress.start_over()

    # Live messages

    def on_live(self, sequence_frame: bytes, payload: bytes, now: float) -> Replay | None:
        if self._ignores():
            return None
        sequence = self._progress.read_sequence(sequence_frame)
        if sequence is None:
            return None
        self._silent_since, self._last_event = math.inf, now
        if self.phase is not Phase.FOLLOWING:
            self._progress.see(sequence)
            self._waiting.add(sequence, payload)
            return None
        question = self._follow(sequence, payload)
        if question is None and now < self._stragglers_until:
            self._forget_emptied()
        return question

    def _follow(self, sequence: int, payload: bytes) -> Replay | None:
        progress = self._progress
        expected = progress.next
        if sequence < expected:
            progress.counters.duplicates += 1
        elif sequence > expected:
            progress.counters.gaps += 1
            progress.see(sequence)
            return self._repair(f"events {expected} to {sequence - 1} are missing")
        elif (batch := progress.read(payload)) is not None:
            progress.apply(batch)
            progress.counters.lag_s = max(0.0, time.time() - batch.time)
        return None

    def go_on(self) -> bool:
        """Apply more of the pending large events; return whether any are left. Later events queue
        up.
        """
        return not self._ignores() and self._progress.go_on()

    def on_foreign(self, kind: str, detail: str) -> None:
        """Count a message without the frames of an event."""
        self._progress.count(MalformedEventError(kind, detail))

    # Replays

    def on_replayed(
        self, attempt: int, sequence_frame: bytes, payload: bytes, now: float
    ) -> Replay | None:
        """Take a message of a replay's answer, its end included."""
        if self._ignores() or attempt != self._attempt:
            return None
        if sequence_frame == END_OF_REPLAY:
            return self._on_replay_ended()
        sequence = self._progress.read_sequence(sequence_frame)
        if sequence is not None:
            self._last_event = now
            self._progress.apply_replayed(sequence, payload)
        if self._ignores():
            self._waiting.empty()
        return None

    def _on_replay_ended(self) -> Replay | None:
        if self._waiting.overflowed:
            return self._repair("more events came than could wait")
        self._backoff.reset()
        self._failure = ""
        if self.phase is Phase.CHECKING:
            self._silent_since = math.inf
        self._forget_emptied()  # replayed events are older
        self._enter(Phase.FOLLOWING)
        for sequence, payload in self._waiting.empty():
            # A gap asks again. The remaining messages came before that question, so its answer has
            # them.
            if question := self._follow(sequence, payload):
                return question
        return None

    def on_replay_failed(self, attempt: int, why: str, now: float) -> None:
        """Back off after a replay could not be requested or its answer stopped."""
        if self._ignores() or attempt != self._attempt:
            return
        pause = self._backoff.next_s()
        logger.warning("%s: %s; asking again in %.0f s", self._label, why, pause)
        self._ask_at = now + pause
        self._failure = why
        self._enter(Phase.REPAIRING, why)

    def _repair(self, cause: str) -> Replay | None:
        self._enter(Phase.REPAIRING, cause)
        return self._ask()

    def _ask(self) -> Replay | None:
        """Ask from the last applied event on: a snapshot has later numbers."""
        self._progress.counters.replays += 1
        self._attempt += 1
        self._ask_at = math.inf
        self._waiting.empty()
        return Replay(self._attempt, max(0, self._progress.next - 1))

    # Reports of the worker

    def on_emptied(self, at: float, now: float) -> None:
        """Note when the worker cleared its blocks, by its clock; 0 for never. The event follows
        only with the engine's next step.
        """
        self._emptied = at
        self._stragglers_until = now + STRAGGLING_S
        self._forget_emptied()

    def _forget_emptied(self) -> None:
        """Clear the blocks unless a later event was applied, which the clearing event preceded."""
        if self._emptied > max(self._progress.time, 0.0) and not self._ignores():
            self._blocks.clear()

    # The clock

    def on_served(self, routed_at: float, now: float) -> None:
        """Note the end of a request that must have stored blocks."""
        if self._last_event < routed_at and self._silent_since == math.inf:
            self._silent_since = now

    def tick(self, now: float) -> Replay | None:
        if self._ignores():
            return None
        if now >= self._ask_at:
            return self._ask()
        if now - self._silent_since < self._silence_s:
            return None
        if self.phase is Phase.FOLLOWING:
            self._enter(Phase.CHECKING)
            return self._ask()
        if not (self._connected or self._said):
            self._said = True
            logger.warning("%s: no connection, though the worker serves requests", self._label)
        return None

    # State

    @property
    def state(self) -> IndexState:
        if self._closed:
            return approximate("the worker is gone")
        if self._blocks.unusable:
            return approximate(self._blocks.unusable)
        if not self._connected:
            return degraded("no connection to its event endpoint")
        if self._failure:
            return approximate(self._failure)
        if self.phase is Phase.REPAIRING:
            return degraded(f"replay under way: {self._cause}; {self._progress.so_far}")
        if self._progress.unknown:
            return degraded(f"blocks stored earlier are unknown: {self._progress.unknown}")
        if self._blocks.unmodelled:
            return degraded(self._blocks.unmodelled)
        return EXACT

    def statistics(self) -> StreamStatistics:
        return self._progress.counters

    def _enter(self, phase: Phase, cause: str = "") -> None:
        self.phase = phase
        self._cause = cause
        if phase is Phase.REPAIRING:
            self._blocks.suspend()
        else:
            self._blocks.resume()

    def _ignores(self) -> bool:
        return self._closed or bool(self._blocks.unusable)
