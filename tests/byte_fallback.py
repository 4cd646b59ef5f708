"""A tokenizer as Llama's and Gemma's: spaces are written ▁, and unknown letters as bytes."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_fallback_tokenizer(words: Iterable[str]) -> Tokenizer:
    """Return one whose tokens are 256 bytes, the space and ``words``."""
    tokens = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return made
