"""Send the events of a plain stream directly: from a worker's message with a token to the client.

Waking a request's task at each token, through all generators, takes several times as long as
sending the event. So vLLM's server writes the events of a stream until one is understood: it has
the text of an output, perhaps token counts, and nothing else that could change. Later events copy
it, until an output is more than a text.
"""

import time
from collections.abc import Callable, Container
from typing import Any, Final, NamedTuple

import msgspec

_SAME_IN_ALL: Final = {"id", "object", "created", "model", "usage"}
_OWN: Final = {"index", "delta", "text"}
_COUNTED: Final = ("prompt_tokens", "total_tokens", "completion_tokens")
_COUNTS: Final = b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d'
_BEFORE: Final = b"data: "
_AFTER: Final = b"\n\n"
_TRIES: Final = 8
"""Events that are examined. Of a plain stream the first or the second one is understood."""

_encode: Final = msgspec.json.Encoder().encode


class DirectEvents:
    """The events of one HTTP request, created before it is known whether it has any."""

    def __init__(self, write: Callable[[bytes], bool]) -> None:
        """``write`` sends a piece of the answer at once; False if that is impossible."""
        self._write: Callable[[bytes], bool] | None = write
        self.sent_at = 0.0
        """``time.monotonic`` of the last event; 0 before the first."""
        self._allowed = self._skips_empty = False
        self._takes_text: Callable[[], bool] | None = None
        self._calls = 0
        self._given: tuple[str, int] | None = None
        self._tries = _TRIES
        self._likeness: _Likeness | None = None

    def allow(self) -> None:
        """Tell that vLLM's server will read nothing but the text of outputs."""
        self._allowed = True

    def parsed_until(self, takes_text: Callable[[], bool], *, skips_empty: bool) -> None:
        """Wait until a parser takes texts unchanged; ``skips_empty`` if it omits empty
        ones then.
        """
        self._takes_text, self._skips_empty = takes_text, skips_empty

    def claim(self) -> bool:
        """Return whether the outputs of an engine call may become events: of the only call."""
        self._calls += 1
        return self._calls == 1

    def close(self) -> None:
        """End with the HTTP request: its context may live on, with connections that it opened."""
        self._write = self._takes_text = None

    def gives(self, text: str, tokens: int) -> None:
        """Note the text that vLLM's server gets next, and the answer's ``tokens`` up to its end."""
        self._given = text, tokens

    def saw(self, event: bytes) -> None:
        """Learn from an event that vLLM's server has written, and that was sent."""
        if self._likeness is not None or not self._tries or not self._applies:
            return
        if not event.startswith(_BEFORE):
            return  # a comment
        if self._takes_text is not None:
            if not self._takes_text():
                return
            self._takes_text = None
        self._tries -= 1
        if self._given is not None:
            self._likeness = _understood(event, *self._given)

    def write(self, piece: bytes) -> bool:
        """Send a piece of the answer that vLLM's server has written; return whether it was sent."""
        sent = self._write is not None and self._write(piece)
        if sent:
            self.sent_at = time.monotonic()
        return sent

    def send(self, text: str, tokens: int) -> bool:
        """Send a text's event; False if nothing was sent. ``tokens`` count the answer to
        its end.
        """
        if self._likeness is None or self._write is None or not self._applies:
            return False
        if not text and self._skips_empty:
            return True
        try:
            return self.write(self._likeness.of(text, tokens))
        except UnicodeEncodeError:
            return False  # a lone surrogate, which vLLM's server writes in a way of its own

    @property
    def _applies(self) -> bool:
        return self._allowed and self._calls == 1


class _Likeness(NamedTuple):
    """The parts that all events of a stream share; ``between`` text and counts, if they count."""

    before: bytes
    after: bytes
    prompt_tokens: int | None = None
    between: bytes = b""

    def of(self, text: str, tokens: int) -> bytes:
        """Return the event of a text; ``tokens`` count the answer up to its end."""
        if self.prompt_tokens is None:
            return b"".join((self.before, _encode(text), self.after))
        counts = _COUNTS % (self.prompt_tokens, self.prompt_tokens + tokens, tokens)
        return b"".join((self.before, _encode(text), self.between, counts, self.after))


def _understood(event: bytes, text: str, tokens: int) -> _Likeness | None:
    """Return the likeness of an event with a text, and perhaps token counts; None of others."""
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
    return _with_counts(_Likeness(before + key, after), said.get("usage"), tokens)


def _with_counts(likeness: _Likeness, usage: object, tokens: int) -> _Likeness | None:
    """Return the likeness with an event's token counts; None if they are not understood."""
    if usage is None:
        return likeness
    if not isinstance(usage, dict) or not _only(usage, _COUNTED):
        return None
    counts = tuple(usage.get(name) for name in _COUNTED)
    prompt_tokens = counts[0]
    if type(prompt_tokens) is not int or counts[1:] != (prompt_tokens + tokens, tokens):
        return None
    between, found, after = likeness.after.partition(_COUNTS % counts)
    if not found:
        return None
    return _Likeness(likeness.before, after, prompt_tokens, between)


def _only(fields: dict[str, Any], names: Container[str]) -> bool:
    """Return whether all fields except some are empty."""
    return all(value is None for name, value in fields.items() if name not in names)
