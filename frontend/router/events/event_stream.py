"""Follow one rank's KV events by sequence number, without any I/O.

Messages and answers go in, :data:`Command` values come out, and :attr:`EventStream.state` says at
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

Here is what happens when something arrives, in the order of the phases. ``progress.py`` reads and
applies events; ``replays.py`` has questions and answers, and live events that wait for an answer.
Sockets are in ``subscriber.py``, the meaning of events in ``index/indexes.py``.
"""

import logging
from enum import Enum

from frontend.router.event_wire import END_OF_REPLAY, MalformedEventError
from frontend.router.events.progress import SILENCE_S, LiveEvents, Progress, StreamStatistics, Watch
from frontend.router.events.replays import (
    BELIEVED_EVENTS,
    WAITING_BYTES,
    Command,
    Replays,
    Resubscribe,
    WaitingMessage,
    WaitingRoom,
)
from frontend.router.index import EXACT, IndexState, TargetBlocks, approximate, degraded

logger = logging.getLogger(__name__)


class Phase(Enum):
    FOLLOWING = "live events are applied as they come"
    REPAIRING = "a replay is under way, blocks are suspended, live events wait"
    CHECKING = "a replay is under way to make sure, live events wait"
    UNAIDED = "no replay is to be had: live events alone"


class Standing:
    """The phase of a stream, and what follows from it: how far its index can be trusted, and
    whether its blocks may be routed on.
    """

    def __init__(self, blocks: TargetBlocks, progress: Progress, watch: Watch) -> None:
        self._blocks = blocks
        self._progress = progress
        self._watch = watch
        self._cause = ""
        self._connected = False
        self._was_connected = False
        self._closed = False
        self.phase = Phase.UNAIDED

    def enter(self, phase: Phase, cause: str = "") -> None:
        self.phase = phase
        self._cause = cause
        self._show()

    def connect(self) -> bool:
        """Note that the live connection was made; return whether it is not the first."""
        again, self._was_connected = self._was_connected, True
        self._connected = True
        self._show()
        return again

    def disconnect(self) -> None:
        self._connected = False
        self._show()

    def close(self) -> None:
        self._closed = True

    def ignores(self) -> bool:
        """Return whether nothing that arrives is of any use."""
        return self._closed or bool(self._blocks.unusable)

    @property
    def state(self) -> IndexState:
        unknown = self._progress.unknown
        if self._closed:
            return approximate("the worker is gone")
        if self._blocks.unusable:
            return approximate(self._blocks.unusable)
        if self.phase is Phase.REPAIRING:
            return degraded(f"replay under way: {self._cause}; {self._progress.so_far}")
        if self.phase is Phase.UNAIDED and unknown and not self._progress.heard:
            return approximate("; ".join(dict.fromkeys((self._cause, unknown))))
        if not self._connected:
            return degraded("no connection to its event endpoint")
        if unknown:
            return degraded(f"blocks stored earlier are unknown: {unknown}")
        if self._watch.mute:
            return degraded("it serves requests but publishes no events")
        if self._blocks.unmodelled:
            return degraded(self._blocks.unmodelled)
        return EXACT

    def _show(self) -> None:
        if self._connected and self.phase is not Phase.REPAIRING:
            self._blocks.resume()
        else:
            self._blocks.suspend()


STRAGGLING_S = 5.0
"""So long after a worker said that its blocks were forgotten, events that look older by its clock
are taken for some that were on their way. Later, its clock was rather set back."""

_ASKING = (Phase.REPAIRING, Phase.CHECKING)
"""While a replay is under way that live events wait for."""


class EventStream:
    """The state machine of one rank.

    Args:
        label: what to call the stream in log lines.
        replayable: whether the worker has a replay endpoint.
        silence_s: how long a serving worker may be silent, in seconds.
        waiting_bytes: of live messages kept while a replay runs.
        believed_events: in an answer up to which its end is believed.
    """

    def __init__(
        self,
        blocks: TargetBlocks,
        label: str,
        *,
        replayable: bool,
        silence_s: float = SILENCE_S,
        waiting_bytes: int = WAITING_BYTES,
        believed_events: int = BELIEVED_EVENTS,
    ) -> None:
        self._label = label
        self._replayable = replayable
        self._blocks = blocks
        self._emptied = 0.0
        self._stragglers_until = float("-inf")
        self._watch = watch = Watch(silence_s)
        self._progress = progress = Progress(blocks, label)
        self._standing = Standing(blocks, progress, watch)
        self._live = LiveEvents(progress, watch)
        self._waiting = WaitingRoom(waiting_bytes)
        self._replays = Replays(progress, watch, believed_events)

    # The worker's life

    def start(self) -> list[Command]:
        if not self._replayable:
            self._standing.enter(Phase.UNAIDED, "the worker has no replay endpoint")
            return []
        return self._start_over("learning what was stored before we listened")

    def close(self) -> None:
        """The worker's incarnation is gone: ignore whatever still arrives."""
        self._standing.close()
        self._waiting.empty()

    def give_up(self, why: str) -> None:
        """The events can't be had for a reason of our own: use none."""
        if not self._standing.ignores():
            self._progress.give_up(why)
            self._waiting.empty()

    # The connection

    def on_connected(self, now: float) -> list[Command]:
        if self._standing.ignores():
            return []
        again = self._standing.connect()
        self._live.forget_order()
        # Whatever was sent before the publisher knew of us is missing: look once more.
        self._watch.look_soon(now)
        if again and self._standing.phase is Phase.UNAIDED:
            self._progress.lose("the connection broke", None)
        elif again and self._standing.phase is not Phase.REPAIRING:
            return self._repair("the connection broke")
        return []

    def on_disconnected(self) -> None:
        self._standing.disconnect()

    # Live messages

    def on_live(self, sequence_frame: bytes, payload: bytes, now: float) -> list[Command]:
        if self._standing.ignores():
            return []
        sequence = self._progress.read_sequence(sequence_frame)
        if sequence is None:
            return []
        self._watch.heard_live(now)
        phase = self._standing.phase
        if phase in _ASKING:
            self._progress.see(sequence)
            self._waiting.add(WaitingMessage(sequence, payload, self._replays.number))
            return []
        missing = self._live.follow(sequence, payload, now, unaided=phase is Phase.UNAIDED)
        if not missing:
            if now < self._stragglers_until:
                self._forget_emptied()
            return []
        # It came before the question, so that the answer must include it.
        self._progress.see(sequence)
        self._waiting.add(WaitingMessage(sequence, payload, self._replays.number))
        return self._repair(missing)

    def go_on(self) -> bool:
        """Apply more of what is left of large events; return whether anything still is.
        Whatever comes meanwhile is applied behind it, or forgets it.
        """
        return not self._standing.ignores() and self._progress.go_on()

    def on_foreign(self, kind: str, detail: str) -> None:
        """A message arrived that has not even the frames of an event."""
        self._progress.count(MalformedEventError(kind, detail))

    # Replays

    def on_replayed(
        self, attempt: int, sequence_frame: bytes, payload: bytes, now: float
    ) -> list[Command]:
        """Take a message of a replay's answer, its end included."""
        if self._standing.ignores() or attempt != self._replays.number:
            return []
        if self._replays.rescue:
            self._begin_rescue(now)
        if sequence_frame == END_OF_REPLAY:
            return self._on_replay_ended(now)
        sequence = self._progress.read_sequence(sequence_frame)
        if sequence is None:
            return []
        if not self._replays.take(sequence, payload, now):
            return self._restart()
        if self._standing.ignores():
            self._waiting.empty()
        return []

    def _on_replay_ended(self, now: float) -> list[Command]:
        replays = self._replays
        if replays.unproven:
            return self._restart()
        if (question := replays.ask_for_rest()) is not None:
            return [question]
        if self._waiting.overflow_noticed():
            return self._repair("more events came than could wait")
        silence = self._standing.phase is Phase.CHECKING and self._watch.silent(now)
        applied, nothing_live = replays.applied, not self._waiting
        replays.whole()
        # The answer is proof of where the worker is, whatever live messages said before.
        self._live.forget_order()
        self._forget_emptied()  # what was replayed is older
        self._standing.enter(Phase.FOLLOWING)
        commands = self._follow_waiting(now, answered=True)
        if silence:
            self._watch.silence_over(confirmed=not applied)
            if applied and nothing_live:
                logger.warning("%s: live events don't arrive, subscribing anew", self._label)
                commands.append(Resubscribe())
        return commands

    def on_replay_failed(self, attempt: int, why: str, now: float) -> list[Command]:
        """A replay could not be asked for, or its answer stopped coming."""
        if self._standing.ignores() or attempt != self._replays.number:
            return []
        if self._replays.applied:
            # The end got lost, as what exceeds the worker's send limit does: go on.
            return [self._replays.ask()]
        pause = self._replays.failed()
        logger.warning("%s: %s; asking again in %.0f s", self._label, why, pause)
        if self._standing.phase is Phase.CHECKING and not self._watch.silent(now):
            # No sign that anything is amiss: live events go on.
            self._watch.look_at(now + pause)
            self._standing.enter(Phase.FOLLOWING)
            return self._follow_waiting(now, answered=False)
        self._replays.retry_at(now + pause)
        if self._replays.rescue:
            return []
        self._progress.lose_touch(why)
        self._watch.silence_over()
        self._standing.enter(Phase.UNAIDED, why)
        return self._follow_waiting(now, answered=False)

    # What the worker says of itself

    def on_emptied(self, at: float, now: float) -> None:
        """The worker had its blocks forgotten at a time of its clock, 0 for never. An event
        says so too, with the engine's next step.
        """
        self._emptied = at
        self._stragglers_until = now + STRAGGLING_S
        self._forget_emptied()

    # The clock

    def on_served(self, routed_at: float, now: float) -> None:
        """A request that was routed at ``routed_at`` and must have stored blocks ended on this
        rank.
        """
        self._watch.served(routed_at, now)

    def tick(self, now: float) -> list[Command]:
        if self._standing.ignores():
            return []
        if self._standing.phase is Phase.UNAIDED:
            if self._watch.silent(now):
                self._watch.silence_over()
                self._progress.lose_touch("it serves requests but sends no events")
            return [self._replays.ask_for_rescue()] if self._replays.retry_due(now) else []
        if self._standing.phase is Phase.FOLLOWING and self._watch.due(now):
            self._standing.enter(Phase.CHECKING)
            return [self._replays.ask()]
        return []

    # What can be seen

    @property
    def state(self) -> IndexState:
        return self._standing.state

    def statistics(self) -> StreamStatistics:
        return self._progress.counters

    # From one phase to another

    def _forget_emptied(self) -> None:
        """Later events were preceded by the one that says it, and what they stored is there."""
        if self._emptied > max(self._progress.time, 0.0) and not self._standing.ignores():
            self._blocks.clear()

    def _repair(self, cause: str) -> list[Command]:
        """Suspend the blocks and catch up."""
        self._standing.enter(Phase.REPAIRING, cause)
        return [self._replays.ask()]

    def _restart(self) -> list[Command]:
        self._progress.counters.restarts += 1
        logger.info("%s: its events started over", self._label)
        return self._start_over("its events started over")

    def _start_over(self, cause: str) -> list[Command]:
        """Forget everything and replay from the beginning."""
        self._progress.start_over()
        self._live.forget_order()
        return self._repair(cause)

    def _begin_rescue(self, now: float) -> None:
        """A replay endpoint that was silent answers: start over with its help."""
        self._replays.begin_rescue()
        self._progress.start_over()
        self._live.forget_order()
        self._standing.enter(Phase.REPAIRING, "the replay endpoint answers again")
        # Live events applied until this moment may be younger than the answer.
        self._watch.look_soon(now)

    def _follow_waiting(self, now: float, *, answered: bool) -> list[Command]:
        """Follow the live messages that waited; stop at one that needs a replay. The last one
        came to its end if ``answered``.
        """
        asked, waiting = self._replays.number, self._waiting.empty()
        unaided = self._standing.phase is Phase.UNAIDED
        for position, (sequence, payload, attempt) in enumerate(waiting):
            if not answered or attempt == asked:
                missing = self._live.follow(sequence, payload, now, unaided=unaided)
            elif self._replays.account_for(sequence):
                missing = f"the replay ended before event {sequence}"
            else:
                continue
            if missing:
                for message in waiting[position:]:
                    self._waiting.add(message)
                return self._repair(missing)
        return []
