"""Questions of one process to all others, relayed by their parent. For one event loop."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Final, Protocol

import msgspec

from common.aio.ipc import LARGEST
from frontend.processes.messages import Answered, Answers, Ask, Asked

ANSWER_S: Final = 2.0
"""How long a process may take; then the others' answers have to do."""

MOST_BYTES: Final = LARGEST - (1 << 16)
"""Of all answers to a question: they go back in one message. What is beyond it is left out, since
a message that is too large would end the connection, and with it the process that asked.
"""


class Asker(Protocol):
    """A process that asks and is asked.

    Attributes:
        name: of the process, as answers have it.
    """

    name: str

    def send(self, message: msgspec.Struct) -> None:
        """Say something to it."""
        ...


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
    """Those that are not answered yet."""

    def __init__(
        self, others: Callable[[], set[Asker]], own: Callable[[str], bytes | None]
    ) -> None:
        """
        Args:
            others: all who can be asked, the asker included.
            own: what the parent itself has to say on a topic.
        """
        self._others = others
        self._own = own
        self._numbers = count(1)
        self._open: dict[int, _Question] = {}

    def ask(self, asker: Asker, question: Ask) -> None:
        """Pass a question on to all others, and the answers back."""
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
        """Take an answer."""
        question = self._open.get(answer.number)
        if question is None or by not in question.missing:
            return
        question.missing.discard(by)
        if answer.body is not None:
            question.bytes += len(answer.body)
            if question.bytes <= MOST_BYTES:
                question.told[by.name] = answer.body
            else:
                question.left_out += 1
        if not question.missing:
            self._end(answer.number)

    def gone(self, process: Asker) -> None:
        """A process is gone: it neither answers nor waits any more."""
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
