"""The events of a plain stream on the shortest way: from the message with a token to the client.

To wake the task of a request at each token, through a generator of each layer and vLLM's own,
takes several times as long as to send what comes of it. So vLLM's server writes the events of a
stream until one is understood: it says the text of an output, perhaps the tokens so far, and
nothing else that could change. Those after it are written in its likeness, until an output is more
than a text.
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
        self._given: tuple[str, int] | None = None
        self._tries = _TRIES
        self._likeness: _Likeness | None = None

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

    def gives(self, text: str, tokens: int) -> None:
        """vLLM's server gets an output with a text next.

        Args:
            tokens: of the answer up to its end.
        """
        self._given = text, tokens

    def saw(self, event: bytes) -> None:
        """vLLM's server has written an event, and it was sent."""
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
        """Send a piece of the answer that vLLM's server has written; says whether it was sent."""
        sent = self._write is not None and self._write(piece)
        if sent:
            self._sent_at = time.monotonic()
        return sent

    def send(self, text: str, tokens: int) -> bool:
        """Send the event of an output that has a text, and nothing else that vLLM's server writes.

        Args:
            tokens: of the answer up to its end.

        Returns:
            Whether it was sent; if not, nothing was.
        """
        if self._likeness is None or self._write is None or not self._applies:
            return False
        if not text and self._skips_empty:
            return True
        try:
            return self.write(self._likeness.of(text, tokens))
        except UnicodeEncodeError:
            return False  # half of a pair: vLLM's server has a way of its own to say so

    @property
    def _applies(self) -> bool:
        return self._allowed and self._calls == 1


class _Likeness(NamedTuple):
    """What is the same in all events of a stream.

    Attributes:
        prompt_tokens: None if the events do not say how many tokens there are.
        between: the text and the tokens, if they do.
    """

    before: bytes
    after: bytes
    prompt_tokens: int | None = None
    between: bytes = b""

    def of(self, text: str, tokens: int) -> bytes:
        """The event of a text.

        Args:
            tokens: of the answer up to its end.
        """
        if self.prompt_tokens is None:
            return b"".join((self.before, _encode(text), self.after))
        counts = _COUNTS % (self.prompt_tokens, self.prompt_tokens + tokens, tokens)
        return b"".join((self.before, _encode(text), self.between, counts, self.after))


def _understood(event: bytes, text: str, tokens: int) -> _Likeness | None:
    """The likeness of an event that says a text, and perhaps how many tokens there are."""
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
    """The likeness with what an event says of its tokens; None if that is not understood."""
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
    """Whether all fields but those of some names are empty."""
    return all(value is None for name, value in fields.items() if name not in names)
