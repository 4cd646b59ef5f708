"""Following one rank's KV events by sequence number, without any I/O.

Messages and answers go in, :class:`Command` values come out, and :attr:`state` says at
any time how far the index can be trusted. The rules:

* Events are applied once each and in order. The next number is applied; a lower one
  that a replay already brought is a duplicate; anything else means loss or a restart.
* On loss, restart or a broken connection the blocks are *suspended* and the worker is
  asked to replay from the last event applied. If its copy of that event differs from
  ours, the worker started over: forget everything and replay from the beginning.
* If what was lost is no longer in the replay buffer, forget everything and go on from
  the oldest event there is. What is indexed from then on is really held; what was
  held before is unknown until the worker clears its cache or starts over.
* A worker that serves requests which must have stored blocks, yet sends nothing, is
  asked the same question without suspending. If it does not answer, it is approximate.
* A message that can't be read changes nothing. If it stood for an event, the gap shows.

Sockets are in ``subscriber.py``, the meaning of events in ``target_blocks.py``.
"""

import logging
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

from frontend.router.event_wire import (
    END_OF_REPLAY,
    Batch,
    Cleared,
    MalformedEventError,
    decode_batch,
    decode_sequence,
)
from frontend.router.index import EXACT, IndexState, approximate, degraded

logger = logging.getLogger(__name__)

_WAITING_BYTES = 64 << 20
"""Live messages kept while a replay runs; beyond it they are replayed instead."""

_SETTLE_S = 0.3
"""After connecting, until the publisher surely knows the subscription."""

_RETRY_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses before asking again a replay endpoint that did not answer."""

_BELIEVED = 500
"""Events in an answer up to which its end is believed. vLLM's socket drops what exceeds
its send limit of 1,000 messages, and may still deliver the end."""

_MUTE_LIMIT = 3
"""Silences, each confirmed by a replay, after which the state says so."""


class Blocks(Protocol):
    """What a stream does to the indexes; see :class:`~target_blocks.TargetBlocks`.

    Attributes:
        unusable: why the events can't be used at all; empty if they can.
        unmodelled: why hits may be shorter than indexed; empty if they are not.
    """

    unusable: str
    unmodelled: str

    def apply(self, batch: Batch) -> None:
        """Apply one batch."""

    def clear(self) -> None:
        """Forget all blocks."""

    def suspend(self) -> None:
        """Keep the blocks but let nobody route on them."""

    def resume(self) -> None:
        """Let the blocks be routed on."""


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


class StreamStatistics(NamedTuple):
    """Counters of one stream since start.

    Attributes:
        batches: event batches applied.
        duplicates: messages that a replay had already brought.
        gaps: losses noticed.
        replays: replays asked for.
        restarts: times the sequence started over.
        losses: times that events were lost for good.
        malformed: unreadable messages by kind.
        next_sequence: number expected next; ``None`` before the first event.
    """

    batches: int
    duplicates: int
    gaps: int
    replays: int
    restarts: int
    losses: int
    malformed: dict[str, int]
    next_sequence: int | None


class _Phase(Enum):
    FOLLOWING = "live events are applied as they come"
    REPAIRING = "a replay is under way, blocks are suspended, live events wait"
    CHECKING = "a replay is under way to make sure, live events wait"
    UNAIDED = "no replay is to be had: live events alone"


class _Waiting(NamedTuple):
    sequence: int
    payload: bytes
    attempt: int


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


class EventStream:
    """The state machine of one rank.

    Args:
        blocks: where events are applied.
        label: what to call the stream in log lines.
        replayable: whether the worker has a replay endpoint.
        silence_s: how long a serving worker may be silent, in seconds.
    """

    def __init__(
        self, blocks: Blocks, label: str, *, replayable: bool, silence_s: float = 2.0
    ) -> None:
        self._blocks = blocks
        self._label = label
        self._replayable = replayable
        self._silence_s = silence_s
        self._phase = _Phase.UNAIDED
        self._closed = False
        self._connected = False
        self._was_connected = False
        # Position: what comes next, and proof of what came last.
        self._next: int | None = None
        self._fingerprint: int | None = None
        self._last_time = float("-inf")
        self._last_live: int | None = None
        # Why some held blocks are unknown; empty if none are.
        self._incomplete = "no event has arrived yet"
        # Why a replay is under way, or why there is none.
        self._cause = ""
        self._heard_unaided = False
        self._attempt = _Attempt()
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._overflowed = False
        # Moments, as monotonic seconds.
        self._retry_at: float | None = None
        self._check_at: float | None = None
        self._silent_since: float | None = None
        self._last_event = float("-inf")
        # In a row.
        self._failures = 0
        self._mute = 0
        # Since start.
        self._batches = self._duplicates = self._gaps = 0
        self._replays = self._restarts = self._losses = 0
        self._malformed: Counter[str] = Counter()

    # What goes in

    def start(self) -> list[Command]:
        """Begin, with nothing known."""
        self._show()
        if not self._replayable:
            self._cause = "the worker has no replay endpoint"
            return []
        return self._start_over("learning what was stored before we listened")

    def close(self) -> None:
        """The worker's incarnation is gone: ignore whatever still arrives."""
        self._closed = True
        self._drain()

    def on_connected(self, now: float) -> list[Command]:
        """The live connection was made, for the first time or again."""
        if self._ignoring:
            return []
        again, self._was_connected = self._was_connected, True
        self._connected = True
        self._last_live = None
        # Whatever was sent before the publisher knew of us is missing: look once more.
        self._check_at = now + _SETTLE_S
        if again and self._phase is _Phase.UNAIDED:
            self._lose("the connection broke", None)
        if again and self._phase in (_Phase.FOLLOWING, _Phase.CHECKING):
            return self._repair("the connection broke")
        self._show()
        return []

    def on_disconnected(self) -> None:
        """The live connection broke; it is made again without being asked."""
        self._connected = False
        self._show()

    def on_live(self, sequence_frame: bytes, payload: bytes, now: float) -> list[Command]:
        """A message from the live connection."""
        if self._ignoring:
            return []
        try:
            sequence = decode_sequence(sequence_frame)
        except MalformedEventError as error:
            self._count(error)
            return []
        self._silent_since = None
        self._mute = 0
        self._last_event = now
        if self._phase in (_Phase.REPAIRING, _Phase.CHECKING):
            self._wait(sequence, payload, self._attempt.number)
            return []
        return self._follow(sequence, payload, now)

    def on_replayed(
        self, attempt: int, sequence_frame: bytes, payload: bytes, now: float
    ) -> list[Command]:
        """A message of a replay's answer, its end included."""
        replay = self._attempt
        if self._ignoring or attempt != replay.number:
            return []
        if replay.rescue:
            self._begin_rescue(now)
        if sequence_frame == END_OF_REPLAY:
            return self._replay_ended(now)
        try:
            sequence = decode_sequence(sequence_frame)
        except MalformedEventError as error:
            self._count(error)
            return []
        first, replay.answered = not replay.answered, True
        expected = self._next or 0
        if replay.verify and first and sequence == expected - 1:
            if hash(payload) != self._fingerprint:
                return self._restarted()
            return []
        # A first message this high means that the buffer begins there: what we had before
        # it can't be told from the events of another run any more.
        begins_late = first and sequence >= expected + (not replay.verify)
        if begins_late or (replay.accept_loss and sequence > expected):
            replay.accept_loss = False
            self._lose(f"events before {sequence} are no longer replayed", sequence)
        self._take(sequence, payload, now)
        return []

    def on_replay_failed(self, attempt: int, why: str, now: float) -> list[Command]:
        """A replay could not be asked for, or its answer stopped coming."""
        replay = self._attempt
        if self._ignoring or attempt != replay.number:
            return []
        if replay.applied:
            # The end got lost, as what exceeds the worker's send limit does: go on.
            return [self._ask(self._phase, self._cause)]
        pause = _RETRY_S[min(self._failures, len(_RETRY_S) - 1)]
        self._failures += 1
        logger.warning("%s: %s; asking again in %.0f s", self._label, why, pause)
        if self._phase is _Phase.CHECKING and not self._silent(now):
            # No sign that anything is amiss: live events go on.
            self._check_at = now + pause
            self._phase = _Phase.FOLLOWING
            return self._follow_waiting(now, answered=False)
        self._retry_at = now + pause
        if replay.rescue:
            return []
        self._lose(why, None)
        self._cause = why
        self._heard_unaided = False
        self._phase = _Phase.UNAIDED
        self._silent_since = None
        self._show()
        return self._follow_waiting(now, answered=False)

    def on_foreign(self, kind: str, detail: str) -> None:
        """A message arrived that has not even the frames of an event."""
        self._count(MalformedEventError(kind, detail))

    def give_up(self, why: str) -> None:
        """The events can't be had for a reason of our own: use none."""
        if not self._ignoring:
            self._blocks.unusable = why
            self._give_up()

    def on_served(self, routed_at: float, now: float) -> None:
        """A request that must have stored blocks ended on this rank.

        Args:
            routed_at: when it was routed.
        """
        if self._last_event < routed_at and self._silent_since is None:
            self._silent_since = now

    def tick(self, now: float) -> list[Command]:
        """Look at the clock; to be called a few times a second."""
        if self._ignoring:
            return []
        if self._phase is _Phase.UNAIDED:
            if self._silent(now):
                self._silent_since = None
                self._heard_unaided = False
                self._lose("it serves requests but sends no events", None)
            if self._retry_at is not None and now >= self._retry_at:
                self._retry_at = None
                return [self._request(0, rescue=True)]
            return []
        check_due = self._check_at is not None and now >= self._check_at
        if self._phase is _Phase.FOLLOWING and (check_due or self._silent(now)):
            self._check_at = None
            return [self._ask(_Phase.CHECKING, "looking for events that did not arrive")]
        return []

    # What can be seen

    @property
    def state(self) -> IndexState:
        """How far the index can be trusted at this moment."""
        if self._closed:
            return approximate("the worker is gone")
        if self._blocks.unusable:
            return approximate(self._blocks.unusable)
        if self._phase is _Phase.REPAIRING:
            return degraded(f"replay under way: {self._cause}")
        if self._phase is _Phase.UNAIDED and self._incomplete and not self._heard_unaided:
            return approximate("; ".join(dict.fromkeys((self._cause, self._incomplete))))
        if not self._connected:
            return degraded("no connection to its event endpoint")
        if self._incomplete:
            return degraded(f"blocks stored earlier are unknown: {self._incomplete}")
        if self._mute >= _MUTE_LIMIT:
            return degraded("it serves requests but publishes no events")
        if self._blocks.unmodelled:
            return degraded(self._blocks.unmodelled)
        return EXACT

    def statistics(self) -> StreamStatistics:
        """Counters since start."""
        return StreamStatistics(
            self._batches,
            self._duplicates,
            self._gaps,
            self._replays,
            self._restarts,
            self._losses,
            dict(self._malformed),
            self._next,
        )

    @property
    def _ignoring(self) -> bool:
        return self._closed or bool(self._blocks.unusable)

    # Following live events

    def _follow(self, sequence: int, payload: bytes, now: float) -> list[Command]:
        """Apply a live message, or find out why it can't be."""
        batch = self._decode(payload)
        if batch is None:
            # If it stood for an event, that is missing now: look for it soon.
            self._check_at = now + _SETTLE_S
            return []
        if self._next is None:
            self._adopt(sequence)
        expected = self._next if self._next is not None else sequence
        rises = self._last_live is None or sequence > self._last_live
        older = batch.time <= self._last_time
        # An event that is next by number but older by the clock may be of an earlier run.
        plausible = batch.time >= self._last_time or self._phase is _Phase.UNAIDED
        if rises and sequence == expected and plausible:
            self._last_live = sequence
            self._apply(sequence, payload, batch)
            return []
        if rises and sequence < expected and older:
            self._last_live = sequence
            self._duplicates += 1
            return []
        self._gaps += 1
        cause = (
            f"events {expected} to {sequence - 1} are missing"
            if sequence > expected
            else f"event {sequence} came after event {expected - 1}"
        )
        if self._phase is _Phase.UNAIDED:
            self._restarts += sequence < expected
            self._lose(cause, sequence)
            if not sequence:
                self._incomplete = ""
            self._last_live = sequence
            self._apply(sequence, payload, batch)
            return []
        # It came before the question, so that the answer must include it.
        self._wait(sequence, payload, self._attempt.number)
        return self._repair(cause)

    def _adopt(self, sequence: int) -> None:
        """Without replay, the first message to arrive says where we are."""
        if not self._heard_unaided:
            self._incomplete = f"the first event to arrive was number {sequence}"
        if not sequence:
            self._incomplete = ""
        self._heard_unaided = True
        self._next = sequence
        self._last_live = None
        self._last_time = float("-inf")

    def _follow_waiting(self, now: float, *, answered: bool) -> list[Command]:
        """Follow the live messages that waited; stop at one that needs a replay.

        Args:
            answered: whether the last replay came to its end.
        """
        asked, waiting = self._attempt.number, self._drain()
        for position, message in enumerate(waiting):
            if not answered or message.attempt == asked:
                commands = self._follow(message.sequence, message.payload, now)
            elif message.sequence < (self._next or 0):
                self._duplicates += 1
                continue
            elif self._attempt.applied:
                # It came before the question, yet the answer ended before it: ask on.
                self._wait(message.sequence, message.payload, message.attempt)
                commands = self._repair(f"the replay ended before event {message.sequence}")
            else:
                # Asking again brought nothing new, so there is no such event.
                self._count(MalformedEventError("sequence", f"number {message.sequence}"))
                continue
            if commands:
                for later in waiting[position + 1 :]:
                    self._wait(later.sequence, later.payload, asked)
                return commands
        return []

    def _apply(self, sequence: int, payload: bytes, batch: Batch) -> None:
        self._blocks.apply(batch)
        if self._blocks.unusable:
            self._give_up()
        elif any(isinstance(change, Cleared) for change in batch.changes):
            self._incomplete = ""
        self._batches += 1
        self._next = sequence + 1
        self._fingerprint = hash(payload)
        self._last_time = max(self._last_time, batch.time)

    # Replaying

    def _repair(self, cause: str) -> list[Command]:
        """Suspend the blocks and catch up."""
        command = self._ask(_Phase.REPAIRING, cause)
        self._show()
        return [command]

    def _start_over(self, cause: str) -> list[Command]:
        """Forget everything and replay from the beginning."""
        self._reset()
        return self._repair(cause)

    def _restarted(self) -> list[Command]:
        self._restarts += 1
        logger.info("%s: its events started over", self._label)
        return self._start_over("its events started over")

    def _reset(self) -> None:
        self._blocks.clear()
        self._next = 0
        self._fingerprint = None
        self._last_time = float("-inf")
        self._last_live = None
        self._incomplete = ""

    def _ask(self, phase: _Phase, cause: str, *, accept_loss: bool = False) -> Replay:
        """Ask for everything after the last event applied, and for that one as proof."""
        self._phase = phase
        self._cause = cause
        verify = self._fingerprint is not None
        return self._request((self._next or 0) - verify, verify=verify, accept_loss=accept_loss)

    def _request(
        self, start: int, *, verify: bool = False, accept_loss: bool = False, rescue: bool = False
    ) -> Replay:
        self._replays += 1
        number = self._attempt.number + 1
        self._attempt = _Attempt(number, verify, accept_loss, rescue)
        return Replay(number, start)

    def _begin_rescue(self, now: float) -> None:
        """A replay endpoint that was silent answers: start over with its help."""
        self._attempt.rescue = False
        self._phase = _Phase.REPAIRING
        self._cause = "the replay endpoint answers again"
        self._reset()
        self._show()
        # Live events applied until this moment may be younger than the answer.
        self._check_at = now + _SETTLE_S

    def _take(self, sequence: int, payload: bytes, now: float) -> None:
        """Apply a replayed message if it is the next."""
        expected = self._next or 0
        if sequence < expected:
            self._duplicates += 1
            return
        if sequence > expected:
            self._attempt.hole = True
            return
        self._attempt.applied += 1
        self._last_event = now
        batch = self._decode(payload)
        if batch is None:
            self._lose(f"event {sequence} can't be read", sequence + 1)
            self._fingerprint = hash(payload)
            return
        self._apply(sequence, payload, batch)

    def _replay_ended(self, now: float) -> list[Command]:
        replay = self._attempt
        if replay.verify and not replay.answered:
            # It has nothing as recent as the last event we applied.
            return self._restarted()
        if replay.hole:
            # What exceeds the worker's send limit is dropped: ask for the rest. If the
            # same is missing again, it is gone.
            return [self._ask(self._phase, self._cause, accept_loss=not replay.applied)]
        if replay.applied > _BELIEVED:
            return [self._ask(self._phase, self._cause)]
        if self._overflowed:
            self._overflowed = False
            return self._repair("more events came than could wait")
        checked_silence = self._phase is _Phase.CHECKING and self._silent(now)
        nothing_live = not self._waiting
        self._failures = 0
        # The answer is proof of where the worker is, whatever live messages said before.
        self._last_live = None
        self._phase = _Phase.FOLLOWING
        self._show()
        commands = self._follow_waiting(now, answered=True)
        if checked_silence:
            self._silent_since = None
            if replay.applied and nothing_live:
                logger.warning("%s: live events don't arrive, subscribing anew", self._label)
                return [*commands, Resubscribe()]
            self._mute += replay.applied == 0
        return commands

    # Helpers

    def _lose(self, why: str, sequence: int | None) -> None:
        """Events are lost for good: forget everything and go on from ``sequence``."""
        self._losses += 1
        self._incomplete = why
        self._blocks.clear()
        self._next = sequence
        self._fingerprint = None
        logger.warning("%s: only blocks stored from now on are known: %s", self._label, why)

    def _give_up(self) -> None:
        self._blocks.clear()
        self._drain()
        logger.warning("%s: its events are not used: %s", self._label, self._blocks.unusable)

    def _show(self) -> None:
        """Let blocks be routed on if nothing is known to be missing."""
        if self._connected and self._phase is not _Phase.REPAIRING:
            self._blocks.resume()
        else:
            self._blocks.suspend()

    def _wait(self, sequence: int, payload: bytes, attempt: int) -> None:
        if self._waiting_bytes + len(payload) > _WAITING_BYTES:
            self._drain()
            self._overflowed = True
        if not self._overflowed:
            self._waiting.append(_Waiting(sequence, payload, attempt))
            self._waiting_bytes += len(payload)

    def _drain(self) -> list[_Waiting]:
        waiting = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        return waiting

    def _silent(self, now: float) -> bool:
        return self._silent_since is not None and now - self._silent_since >= self._silence_s

    def _decode(self, payload: bytes) -> Batch | None:
        try:
            return decode_batch(payload)
        except MalformedEventError as error:
            self._count(error)
            if error.kind == "integer-hashes" and not self._blocks.unusable:
                self._blocks.unusable = (
                    "its events carry hashes cut to 64 bits; "
                    "start it without VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
                )
                self._give_up()
            return None

    def _count(self, error: MalformedEventError) -> None:
        self._malformed[error.kind] += 1
        if self._malformed[error.kind] == 1:
            logger.warning("%s: %s; further ones are only counted", self._label, error)
