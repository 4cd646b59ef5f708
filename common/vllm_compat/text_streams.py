"""Text of the tokens of an answer, at a cost that grows neither with its prompt nor with tokens
that have no text.

vLLM gives the whole prompt to ``DecodeStream`` of tokenizers, which reads it once for each choice:
32,000 tokens take 30 ms of a worker's event loop. It reads tokens without text, such as bytes that
are no letter, again at each further one: 8,000 took 30 s. And the answer to a prompt that ends
within a letter, or with U+FFFD, began with the prompt.
"""

from collections.abc import Sequence
from typing import Final

import tokenizers.decoders
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

TAILS: Final = (64, 4096)
"""Last tokens of a prompt that are read; the larger number if these are all special."""

MAX_SILENT: Final = 64
"""Tokens without text that are read again."""

_LETTER: Final = 3
"""Tokens, each a byte at least, that an unfinished letter has at most."""

_NO_LETTER: Final = "\ufffd"


class TextStream:
    """A ``DecodeStream`` with bounds. For one answer."""

    def __init__(
        self, ids: Sequence[int] | None = None, *, skip_special_tokens: bool = False
    ) -> None:
        """``ids`` are the tokens before the answer."""
        self._prompt = ids
        self._skips = skip_special_tokens
        self._stream: DecodeStream | None = None
        self._spoken: list[int] = []  # tokens of the last text
        self._silent: list[int] = []  # tokens since then

    def step(self, tokenizer: Tokenizer, token: int) -> str | None:
        """Return the text that a token adds; None if it adds none, or none yet."""
        if self._stream is None:
            self._stream = self._begun(tokenizer)
        text = self._stream.step(tokenizer, token)
        self._silent.append(token)
        if text is not None:
            self._spoken, self._silent = self._silent, []
        elif len(self._silent) >= MAX_SILENT:
            text = self._given_up(tokenizer)
        return text

    def _begun(self, tokenizer: Tokenizer) -> DecodeStream:
        tail: list[int] = []
        for size in TAILS:
            tail = list((self._prompt or [])[-size:])
            if self._decoded(tokenizer, tail):
                break
        self._prompt = None
        one = len(tokenizer.encode("a", add_special_tokens=False).ids)
        mark: list[int] = tokenizer.encode("a" + _NO_LETTER, add_special_tokens=False).ids[one:]
        while mark and tail[-len(mark) :] == mark:
            del tail[-len(mark) :]  # as a client wrote it
        begun = len(tail)
        while self._decoded(tokenizer, tail[:begun]).endswith(_NO_LETTER):
            begun -= 1
            if begun < len(tail) - _LETTER:
                tail, begun = [], 0  # these bytes are no letter
        return self._restarted(tokenizer, tail[:begun], tail[begun:])

    def _given_up(self, tokenizer: Tokenizer) -> str | None:
        """Return the text of many tokens as if no letter came of them, but for the last ones."""
        silent, last = self._silent[:-_LETTER], self._silent[-_LETTER:]
        text = self._decoded(tokenizer, silent)
        self._stream = self._restarted(tokenizer, [] if text else self._spoken, last)
        return text or None

    def _restarted(
        self, tokenizer: Tokenizer, spoken: list[int], silent: list[int]
    ) -> DecodeStream:
        stream = DecodeStream(ids=spoken, skip_special_tokens=self._skips)
        for token in silent:
            stream.step(tokenizer, token)
        self._spoken, self._silent = spoken, silent
        return stream

    def _decoded(self, tokenizer: Tokenizer, ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=self._skips)


def install() -> None:
    """Have vLLM's detokenizers of this process use :class:`TextStream`."""
    vars(tokenizers.decoders)["DecodeStream"] = TextStream
