"""Remember the texts of tokens: vLLM decodes each candidate of each token of an answer anew."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from vllm.tokenizers import TokenizerLike

REMEMBERED: Final = 1 << 16
"""Texts that are kept, of some hundred bytes each."""

FEW: Final = 5
"""Tokens of the longest text that is kept. vLLM decodes four with a token that is no character."""

PART: Final = "\ufffd"
"""End of a text whose last bytes are no character, perhaps until others follow."""


def remember_texts(tokenizer: TokenizerLike) -> None:
    """Have a tokenizer decode few tokens once, and look them up from then on.

    Transformers takes 10 µs a token. Eight answers with 20 candidates for each token thus took 2 ms
    of a worker's event loop for a step of its engine, and the answers of all others wait for that.
    A part of a character is decoded after up to four tokens before it, which all candidates share.
    Of such a text vLLM reads only whether it ends as an incomplete one.

    A token that only the model has, as Kimi-Audio's of sounds, has no text. It ended the engine.
    """
    decode = tokenizer.decode

    @lru_cache(REMEMBERED)
    def remembered(*ids: int) -> str:
        try:
            return decode(list(ids))
        except LookupError:  # of tiktoken, for a token that the model alone has
            return "".join(map(remembered, ids)) if len(ids) > 1 else ""

    def decode_few(ids: Sequence[int] | int, *rest: bool, **options: bool) -> str:
        if rest or options or not isinstance(ids, list) or len(ids) > FEW:
            return decode(ids, *rest, **options)
        if len(ids) > 1 and (last := remembered(ids[-1])).endswith(PART):
            before = remembered(ids[-2])
            if before and not before.endswith(PART):  # nothing that the last token could complete
                return remembered(*ids[:-1]) + last
        return remembered(*ids)

    vars(tokenizer)["decode"] = decode_few
