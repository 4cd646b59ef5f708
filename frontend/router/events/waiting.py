"""Live messages that wait for the end of a replay."""

from typing import NamedTuple

WAITING_BYTES = 64 << 20
"""Live messages kept while a replay runs; beyond it they are replayed instead."""


class WaitingMessage(NamedTuple):
    """A live message.

    Attributes:
        sequence: its number.
        payload: its event.
        attempt: number of the last replay that had been asked for when it came.
    """

    sequence: int
    payload: bytes
    attempt: int


class WaitingRoom:
    """Keeps messages in order, up to a limit.

    Args:
        limit_bytes: of all payloads together.
    """

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
        """Take out all messages, in the order in which they came."""
        messages, self._messages = self._messages, []
        self._bytes = 0
        return messages

    def overflow_noticed(self) -> bool:
        """Whether messages were thrown away; from now on they are kept again."""
        overflowed, self._overflowed = self._overflowed, False
        return overflowed
