"""What a frontend's processes and their parent say to each other."""

from typing import TypeAlias

import msgspec


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """What a process needs of its parent, by its arguments. The first thing that it says.

    Attributes:
        host, port: where the frontend listens.
        uds: the Unix socket to listen on instead.
        arena_bytes: size of the arena; 0 for none.
        arena_needed: whether there is no serving without it.
    """

    host: str | None
    port: int
    uds: str | None
    arena_bytes: int
    arena_needed: bool


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """What it gets. With descriptors: of the memory where connections are counted, of the sockets
    to listen on, and behind them that of the arena's connection, if there is one.

    Attributes:
        offer: of the arena, as JSON; None without one.
        alone: nobody else listens yet, so it does before it is ready.
    """

    offer: bytes | None
    alone: bool


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The process listens to its parent: it need not be signalled any more."""


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """It has let users in."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question to all other processes, answered with :class:`Answers`."""

    number: int
    topic: str
    argument: bytes


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """A question of another process, answered with :class:`Answered`."""

    number: int
    topic: str
    argument: bytes


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """An answer to it.

    Attributes:
        body: None if it can't be answered yet, or only by more than a message holds.
    """

    number: int
    body: bytes | None


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """All answers to a question.

    Attributes:
        told: by process.
        silent: processes that did not answer in time, or more than one message holds.
    """

    number: int
    told: dict[str, bytes]
    silent: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The process is to end.

    Attributes:
        at_once: without waiting for what it works on.
    """

    at_once: bool


FromChild: TypeAlias = Plan | Attached | Serving | Ask | Answered
FromParent: TypeAlias = Assigned | Asked | Answers | Stop
