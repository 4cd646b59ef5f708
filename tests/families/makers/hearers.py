"""Models that hear, whose processors are vLLM's own."""

import json
from typing import Any

import transformers as hf

from tests.families.makers.base import (
    HEADS,
    HIDDEN,
    VISION_LAYERS,
    Tiny,
    chat,
    decoder,
    ears,
    ids,
    vocabulary,
)

BINS = 32

CODE = """\
from transformers import AutoConfig, PretrainedConfig


class AudioConfig(PretrainedConfig):
    model_type = "tiny_audio"

    def __init__(self, audio_config=None, language_config=None, **more):
        self.audio_config = dict(audio_config or {})
        self.language_config = AutoConfig.for_model(
            **(language_config or {"model_type": "qwen3"})
        )
        super().__init__(**more)

    def get_text_config(self, decoder=False, **more):
        return self.language_config
"""

_HEARD = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")


def _speech_tokenizer() -> dict[str, str]:
    """A tokenizer for codes of speech, of which only the padding is ever used."""
    from tokenizers import AddedToken, Tokenizer, models

    pad = "<|audio_pad|>"
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(pad, special=True)])
    named = {"pad_token": pad, "tokenizer_class": "PreTrainedTokenizerFast"}
    return {
        "speech_tokenizer/tokenizer.json": tokenizer.to_str(),
        "speech_tokenizer/tokenizer_config.json": json.dumps(named),
    }


def fun_audio_chat() -> Tiny:
    """Fun-Audio-Chat: a spectrum and codes of speech, five of which are one token."""
    tokenizer = vocabulary(chat(audio="".join(_HEARD)), *_HEARD)
    # A minute: for five, which is usual, the model asks for a kernel of GPUs.
    sizes = ears(60 // 5, output_dim=HIDDEN, n_window=50)
    config = {
        "architectures": ["FunAudioChatForConditionalGeneration"],
        "model_type": "funaudiochat",
        "dtype": "float32",
        "audio_token_index": ids(tokenizer, "<|AUDIO|>")[0],
        "audio_config": sizes | {"codebook_size": 16, "group_size": 5, "pad_token_id": 1},
        "text_config": decoder(tokenizer, "qwen3"),
    }
    ear = hf.WhisperFeatureExtractor(feature_size=BINS)
    return Tiny(config, tokenizer, ear, files=_speech_tokenizer())


def moss_audio() -> Tiny:
    """MOSS-Audio: what one layer of its encoder hears is put into the language model's first."""
    tokenizer = vocabulary(chat(audio="".join(_HEARD)), *_HEARD)
    start, audio, end = ids(tokenizer, *_HEARD)
    config: dict[str, Any] = {
        "architectures": ["MossAudioModel"],
        "model_type": "tiny_audio",
        "auto_map": {"AutoConfig": "configuration_audio.AudioConfig"},
        "dtype": "float32",
        "adapter_hidden_size": 2 * HIDDEN,
        "audio_config": {
            "d_model": HIDDEN, "output_dim": HIDDEN, "num_mel_bins": BINS,
            "encoder_layers": VISION_LAYERS, "encoder_attention_heads": HEADS,
            "encoder_ffn_dim": 2 * HIDDEN, "downsample_hidden_size": 32,
            "deepstack_encoder_layer_indexes": [0],
        },
        "language_config": decoder(tokenizer, "qwen3"),
    }  # fmt: skip
    processor = {
        "audio_start_id": start, "audio_token_id": audio, "audio_end_id": end,
        "mel_config": {"mel_dim": BINS},
    }  # fmt: skip
    files = {"configuration_audio.py": CODE, "processor_config.json": json.dumps(processor)}
    return Tiny(config, tokenizer, files=files)
