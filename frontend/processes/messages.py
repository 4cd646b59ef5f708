"""Messages between a frontend's processes and their parent, which relays
questions. One event loop.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Final, Protocol, TypeAlias

import msgspec

from common.aio.ipc import LARGEST


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """First message of a process: its needs. ``uds`` replaces host and
    port; 0 bytes for no arena.
    """

    host: str | None
    port: int
    uds: str | None
    arena_bytes: int
    arena_needed: bool


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """Resources for a process. Descriptors travel along: of the connection counts, of the listening
    sockets, and last of the arena's connection, if any. ``alone`` if no other process listens yet,
    so that this one does before it is ready.
    """

    offer: bytes | None
    alone: bool


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The process listens to its parent: it needs no signals any more."""


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The process accepts users."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Question to all other processes, answered with :class:`Answers`."""

    number: int
    topic: str
    argument: bytes


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """Question of another process, answered with :class:`Answered`."""

    number: int
    topic: str
    argument: bytes


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """Answer to :class:`Asked`; None if unavailable or larger than a message."""

    number: int
    body: bytes | None


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """All answers to a question, by process; ``silent`` counts those late or too large."""

    number: int
    told: dict[str, bytes]
    silent: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The process must end; ``at_once`` without finishing its requests."""

    at_once: bool


FromChild: TypeAlias = Plan | Attached | Serving | Ask | Answered
FromParent: TypeAlias = Assigned | Asked | Answers | Stop

ANSWER_S: Final = 2.0
"""Time-out of a process's answer."""

MAX_BYTES: Final = LARGEST - (1 << 16)
"""Limit of all answers to a question, which go back in one message. Answers beyond it are left out:
a larger message would end the connection, and with it the process that asked."""


class Asker(Protocol):
    """A process that asks and is asked; ``name`` is its key in answers."""

    name: str

    def send(self, message: msgspec.Struct) -> None: ...


class _Question:
    def __init__(self, asker: Asker, number: int, missing: set[Asker]) -> None:
        self.asker = asker
        self.number = number
        self.missing = missing
        self.told: dict[str, bytes] = {}
        self.bytes = 0
        self.left_out = 0
        self.timer: asyncio.TimerHandle | None = None


class Questions:
    """Open questions."""

    def __init__(
        self, others: Callable[[], set[Asker]], own: Callable[[str], bytes | None]
    ) -> None:
        """``others`` returns all processes, the asker included; ``own`` returns the parent's
        answer.
        """
        self._others = others
        self._own = own
        self._numbers = count(1)
        self._open: dict[int, _Question] = {}

    def ask(self, asker: Asker, question: Ask) -> None:
        """Relay a question to the other processes, and their answers back."""
        missing = self._others() - {asker}
        number = next(self._numbers)
        asked = self._open[number] = _Question(asker, question.number, set(missing))
        if (own := self._own(question.topic)) is not None:
            asked.told["parent"] = own
        loop = asyncio.get_running_loop()
        asked.timer = loop.call_later(ANSWER_S, self._end, number)
        for other in missing:
            other.send(Asked(number, question.topic, question.argument))
        if not missing:
            self._end(number)

    def answered(self, by: Asker, answer: Answered) -> None:
        question = self._open.get(answer.number)
        if question is None or by not in question.missing:
            return
        question.missing.discard(by)
        if answer.body is not None:
            question.bytes += len(answer.body)
            if question.bytes <= MAX_BYTES:
                question.told[by.name] = answer.body
            else:
                question.left_out += 1
        if not question.missing:
            self._end(answer.number)

    def gone(self, process: Asker) -> None:
        """End the questions of a dead process, and wait for no answer of it."""
        for number, question in list(self._open.items()):
            if question.asker is process:
                self._end(number)
            else:
                self.answered(process, Answered(number, None))

    def _end(self, number: int) -> None:
        question = self._open.pop(number)
        if question.timer is not None:
            question.timer.cancel()
        silent = len(question.missing) + question.left_out
        question.asker.send(Answers(question.number, question.told, silent))
