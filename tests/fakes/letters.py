"""An answer whose every letter follows from its place."""

import string
from functools import cache

from transformers import AutoTokenizer

_LETTERS = string.ascii_lowercase


def letter(place: int) -> str:
    """What stands at a place of a prompt and its answer, counted in tokens. No part of the order
    is like another within what a test reads.
    """
    return _LETTERS[(place * place + place // 26) % 26]


def text(prompt_tokens: int, count: int) -> str:
    """An answer."""
    return "".join(map(letter, range(prompt_tokens, prompt_tokens + count)))


@cache
def letter_tokens(model: str) -> dict[str, int]:
    """The token of each letter."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = {each: tokenizer.encode(each, add_special_tokens=False) for each in _LETTERS}
    return {each: token for each, (token,) in ids.items()}
