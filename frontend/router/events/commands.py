"""What a stream asks of whoever has the sockets."""

from typing import NamedTuple, TypeAlias


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
