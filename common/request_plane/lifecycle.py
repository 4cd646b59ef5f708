"""Life of a request as one table of states and events. No I/O, no clock.

A frontend keeps a :class:`Lifecycle` per request and reports events to it. A transition outside the
table means that one side broke the protocol:

- A worker may ask for media, and acks, only before the first output of an attempt.
- A worker that fails before the first output costs the request nothing: another worker gets it as
  new.
- A worker that fails later leaves the request *moving*: another worker resumes after the output so
  far.
- Every request ends exactly once.

``docs/lifecycle.md`` is generated from this table by ``setup/lifecycle_page.py``.
"""

from enum import StrEnum

from common.errors import ProtocolError


class State(StrEnum):
    """States of a request."""

    PREPARING = "preparing"
    CHOOSING = "choosing"
    WAITING = "waiting"
    STREAMING = "streaming"
    MOVING = "moving"
    RESUMING = "resuming"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(StrEnum):
    """Events of a request."""

    PREPARED = "prepared"
    DISPATCHED = "dispatched"
    NACK = "nack"
    ACK = "ack"
    OUTPUT = "output"
    LAST_OUTPUT = "last output"
    WORKER_FAILED = "worker failed"
    ERROR = "error"
    CANCEL = "cancel"


FINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})  # states that are never left

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.PREPARING, Event.PREPARED): State.CHOOSING,
    (State.CHOOSING, Event.DISPATCHED): State.WAITING,
    (State.CHOOSING, Event.WORKER_FAILED): State.CHOOSING,
    (State.WAITING, Event.NACK): State.WAITING,
    (State.WAITING, Event.ACK): State.WAITING,
    (State.WAITING, Event.OUTPUT): State.STREAMING,
    (State.WAITING, Event.LAST_OUTPUT): State.FINISHED,
    (State.WAITING, Event.WORKER_FAILED): State.CHOOSING,
    (State.STREAMING, Event.OUTPUT): State.STREAMING,
    (State.STREAMING, Event.LAST_OUTPUT): State.FINISHED,
    (State.STREAMING, Event.WORKER_FAILED): State.MOVING,
    (State.MOVING, Event.DISPATCHED): State.RESUMING,
    (State.MOVING, Event.WORKER_FAILED): State.MOVING,
    (State.RESUMING, Event.NACK): State.RESUMING,
    (State.RESUMING, Event.ACK): State.RESUMING,
    (State.RESUMING, Event.OUTPUT): State.STREAMING,
    (State.RESUMING, Event.LAST_OUTPUT): State.FINISHED,
    (State.RESUMING, Event.WORKER_FAILED): State.MOVING,
}
for _state in State:
    if _state not in FINAL:
        TRANSITIONS[_state, Event.ERROR] = State.FAILED
        TRANSITIONS[_state, Event.CANCEL] = State.CANCELLED


class Lifecycle:
    def __init__(self) -> None:
        self._state = State.PREPARING

    @property
    def state(self) -> State:
        return self._state

    @property
    def answered(self) -> bool:
        """Whether any worker has produced an output of the request."""
        return self._state in (State.STREAMING, State.MOVING, State.RESUMING)

    @property
    def ended(self) -> bool:
        return self._state in FINAL

    def on(self, event: Event) -> None:
        """Take a transition. Raises ProtocolError: impossible here; the state stays."""
        following = TRANSITIONS.get((self._state, event))
        if following is None:
            raise ProtocolError(f"unexpected {event!s} while a request is {self._state!s}")
        self._state = following
