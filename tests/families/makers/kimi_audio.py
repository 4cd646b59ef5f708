"""Kimi-Audio, whose tokenizer is vLLM's own and whose special tokens have ids that are fixed in
vLLM's code."""

import base64
import itertools
import json
import string
from collections.abc import Iterator, Mapping
from pathlib import Path

import transformers as hf

from tests.families.makers.base import HIDDEN, Tiny, chat, decoder, ears, vocabulary

BINS = 32
SPECIAL: Mapping[str, int] = {
    "<|im_bos|>": 151643,
    "<|im_eos|>": 151644,
    "<|im_msg_end|>": 151645,
    "<|im_media_begin|>": 151661,
    "<|im_media_end|>": 151663,
    "<|im_kimia_text_blank|>": 151666,
    "<|im_kimia_user_msg_start|>": 151670,
    "<|im_kimia_assistant_msg_start|>": 151671,
}
WORDS = min(SPECIAL.values())
VOCABULARY = max(SPECIAL.values()) + 1

# The tokenizer hands over a conversation where a list of conversations is wanted, so that
# "messages" are the fields of the first message. All messages have the other name.
TEMPLATE = "{%- set messages = conversation -%}" + (
    chat(audio="<|im_media_begin|><|im_kimia_text_blank|><|im_media_end|>")
    .replace("<|im_start|>assistant", "<|im_kimia_assistant_msg_start|>")
    .replace("<|im_start|>", "<|im_kimia_user_msg_start|>")
    .replace("<|im_end|>", "<|im_msg_end|>")
)


class Pieces:
    """A vocabulary in tiktoken's form that reaches up to the special tokens: all bytes, all pairs
    of what can be printed, and as many threes of letters and digits as there is room for."""

    pad_token_id = SPECIAL["<|im_eos|>"]
    eos_token_id = SPECIAL["<|im_msg_end|>"]

    def save_pretrained(self, directory: Path) -> None:
        lines = (
            f"{base64.b64encode(piece).decode()} {rank}\n"
            for rank, piece in enumerate(itertools.islice(self._pieces(), WORDS))
        )
        (directory / "tiktoken.model").write_text("".join(lines))
        added = {str(number): {"content": token} for token, number in SPECIAL.items()}
        settings = json.dumps({"added_tokens_decoder": added})
        (directory / "tokenizer_config.json").write_text(settings)

    @staticmethod
    def _pieces() -> Iterator[bytes]:
        printed, letters = range(32, 127), (string.ascii_letters + string.digits).encode()
        yield from (bytes([byte]) for byte in range(256))
        yield from map(bytes, itertools.product(printed, repeat=2))
        yield from map(bytes, itertools.product(letters, repeat=3))


def kimi_audio() -> Tiny:
    """Kimi-Audio: one sound, added to the words under it."""
    tokenizer = Pieces()
    config = decoder(vocabulary(TEMPLATE), "qwen2") | {
        "architectures": ["MoonshotKimiaForCausalLM"],
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "bos_token_id": SPECIAL["<|im_bos|>"],
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "kimia_adaptor_input_dim": 4 * HIDDEN,
    }
    ear = hf.WhisperFeatureExtractor(feature_size=BINS)
    files = {
        "whisper-large-v3/config.json": hf.WhisperConfig(**ears()).to_json_string(),
        "whisper-large-v3/preprocessor_config.json": ear.to_json_string(),
        "chat_template.jinja": TEMPLATE,
    }
    return Tiny(config, tokenizer, files=files)
