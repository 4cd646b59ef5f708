"""The events of a plain stream on the shortest way: from the message with a token to the client.

To wake the task of a request at each token, through a generator of each layer and vLLM's own,
takes several times as long as to send what comes of it. So vLLM's server writes the events of a
stream until one is understood: it says the text of an output, and nothing else that could change.
Those after it are written in its likeness, until an output is more than a text.
"""

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

import msgspec

_SAME_IN_ALL: Final = {"id", "object", "created", "model"}
_OWN: Final = {"index", "delta", "text"}
_BEFORE: Final = b"data: "
_AFTER: Final = b"\n\n"
_TRIES: Final = 8
"""Events that are looked at. Of a plain stream the first or the second one is understood."""

_encode: Final = msgspec.json.Encoder().encode


class DirectEvents:
    """The events of one HTTP request, if it has any: made before anybody knows."""

    def __init__(self, write: Callable[[bytes], bool]) -> None:
        """
        Args:
            write: sends a piece of the answer at once; False if that can't be.
        """
        self._write: Callable[[bytes], bool] | None = write
        self._sent_at = 0.0
        self._allowed = self._skips_empty = False
        self._takes_text: Callable[[], bool] | None = None
        self._calls = 0
        self._text: str | None = None
        self._tries = _TRIES
        self._parts: tuple[bytes, bytes] | None = None

    def allow(self) -> None:
        """vLLM's server will look at nothing but the text of outputs."""
        self._allowed = True

    def parsed_until(self, takes_text: Callable[[], bool], *, skips_empty: bool) -> None:
        """A parser looks at each text, until it takes all of them as they are.

        Args:
            takes_text: whether it does now.
            skips_empty: whether it says nothing then where there is no text.
        """
        self._takes_text, self._skips_empty = takes_text, skips_empty

    def claim(self) -> bool:
        """Whether the outputs of a call of the engine may become events; of several calls none."""
        self._calls += 1
        return self._calls == 1

    @property
    def sent_at(self) -> float:
        """When the last one was sent, by ``time.monotonic``; 0 if none was."""
        return self._sent_at

    def close(self) -> None:
        """The HTTP request has ended. Its context may go on, with connections that it opened."""
        self._write = self._takes_text = None

    def gives(self, text: str) -> None:
        """vLLM's server gets an output with a text next."""
        self._text = text

    def saw(self, event: bytes) -> None:
        """vLLM's server has written an event, and it was sent."""
        if self._parts is not None or not self._tries or not self._applies:
            return
        if not event.startswith(_BEFORE):
            return  # a comment
        if self._takes_text is not None:
            if not self._takes_text():
                return
            self._takes_text = None
        self._tries -= 1
        if self._text is not None:
            self._parts = _around(event, self._text)

    def write(self, piece: bytes) -> bool:
        """Send a piece of the answer that vLLM's server has written; says whether it was sent."""
        sent = self._write is not None and self._write(piece)
        if sent:
            self._sent_at = time.monotonic()
        return sent

    def send(self, text: str) -> bool:
        """Send the event of an output that has a text, and nothing else that vLLM's server writes.

        Returns:
            Whether it was sent; if not, nothing was.
        """
        if self._parts is None or self._write is None or not self._applies:
            return False
        if not text and self._skips_empty:
            return True
        before, after = self._parts
        try:
            return self.write(b"".join((before, _encode(text), after)))
        except UnicodeEncodeError:
            return False  # half of a pair: vLLM's server has a way of its own to say so

    @property
    def _applies(self) -> bool:
        return self._allowed and self._calls == 1


current_events: Final[ContextVar[DirectEvents | None]] = ContextVar("events", default=None)
"""Of the HTTP request that this task works on."""


def _around(event: bytes, text: str) -> tuple[bytes, bytes] | None:
    """What stands before and after a text in an event that says nothing else, if it is one."""
    if not event.startswith(_BEFORE) or event.find(_AFTER) != len(event) - len(_AFTER):
        return None
    try:
        said: Any = msgspec.json.decode(event[len(_BEFORE) :])
        (choice,) = said.pop("choices")
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError):
        return None
    if not isinstance(choice, dict) or not _only(said, _SAME_IN_ALL) or not _only(choice, _OWN):
        return None
    if choice.get("index") != 0:
        return None
    if "delta" in choice and choice["delta"] == {"content": text}:
        key = b'"delta":{"content":'
    elif choice.get("text") == text and "delta" not in choice:
        key = b'"text":'
    else:
        return None
    # In a string its quotes would be escaped, so a name of a model can't look like this.
    before, found, after = event.partition(key + _encode(text))
    if not found or key in after:
        return None
    return before + key, after


def _only(fields: dict[str, Any], names: set[str]) -> bool:
    """Whether all fields but those of some names are empty."""
    return all(value is None for name, value in fields.items() if name not in names)
