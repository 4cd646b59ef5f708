"""Models of which vLLM itself has the processor, and Cohere Compass.

Pixtral and Voxtral lie in Mistral's own format: ``params.json``, and ``tekken.json`` for all that a
tokenizer, a chat template and a processor do elsewhere.
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers as hf

from tests.families.makers.base import (
    HEAD,
    HEADS,
    HIDDEN,
    LAYERS,
    MROPE,
    PATCH,
    SIDE,
    VISION_LAYERS,
    Settings,
    Tiny,
    chat,
    decoder,
    ids,
    square,
    tower,
    vision,
    vocabulary,
)
from tests.families.makers.qwens import geometry

POSITIONS = 32768


def bagel() -> Tiny:
    """BAGEL: as many tokens for every image, which look at one another in both directions."""
    tokenizer = vocabulary(chat("<|image_pad|>"), "<|image_pad|>")
    config = {
        "architectures": ["BagelForConditionalGeneration"],
        "model_type": "bagel",
        "dtype": "float32",
        "llm_config": decoder(tokenizer),
        "vit_config": vision(vision_use_head=False),
        "vit_max_num_patch_per_side": SIDE // PATCH,
    }
    return Tiny(config, tokenizer, hf.SiglipImageProcessor(size=square()))


def glm_4v() -> Tiny:
    """GLM-4V: ChatGLM's words for everything, one image at most, padding in its place."""
    media = ("<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>")
    tokenizer = vocabulary(chat("".join(media)), media[0], media[2])
    start, pad, end = ids(tokenizer, *media)
    config = {
        "architectures": ["GLM4VForCausalLM"],
        "model_type": "chatglm",
        "dtype": "float32",
        "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": 2 * HIDDEN,
        "num_attention_heads": HEADS, "kv_channels": HEAD, "multi_query_attention": True,
        "multi_query_group_num": 1, "add_qkv_bias": True, "original_rope": True,
        "padded_vocab_size": len(tokenizer), "seq_length": POSITIONS, "tie_word_embeddings": False,
        "boi_token_id": start, "eoi_token_id": end, "pad_token_id": pad,
        "eos_token_id": tokenizer.eos_token_id,
        "vision_config": vision(
            num_heads=HEADS, in_channels=3, num_positions=(SIDE // PATCH) ** 2 + 1,
            hidden_act="gelu", layer_norm_eps=1e-6, dropout_prob=0.0, scaling_factor=1.0,
        ),
    }  # fmt: skip
    return Tiny(config, tokenizer)


STEP_TOKENS = (
    "<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>",
)  # fmt: skip


def step3_vl() -> Tiny:
    """Step3: windows of an image before the whole of it, one key head, experts."""
    tokenizer = vocabulary(chat("<im_patch>"), *STEP_TOKENS)
    text = decoder(
        tokenizer, architectures=["Step3TextForCausalLM"], num_attention_groups=1,
        rms_norm_eps=1e-5, max_seq_len=POSITIONS, max_position_embedding=POSITIONS,
        moe_layers_enum="1,2", moe_num_experts=4, moe_top_k=2, moe_intermediate_size=HIDDEN,
        share_expert_dim=HIDDEN, share_q_dim=HIDDEN, norm_expert_weight=True,
    )  # fmt: skip
    del text["num_key_value_heads"]
    config = {
        "architectures": ["Step3VLForConditionalGeneration"],
        "model_type": "step3_vl",
        "dtype": "float32",
        "text_config": text,
        # The processor's sizes are fixed; with patches of 28 and steps of one, as many tokens come
        # out as with 14 and two.
        "vision_config": vision(
            image_size=728, patch_size=28, output_hidden_size=HIDDEN, hidden_act="quick_gelu"
        ),
        "understand_projector_stride": 1,
        "image_token_id": ids(tokenizer, "<im_patch>")[0],
    }
    return Tiny(config, tokenizer)


def cohere_compass() -> Tiny:
    """Cohere Compass: deepstack and M-RoPE, which layers without a window have none of."""
    media = ("<|VISION_START|>", "<|IMAGE_PAD|>", "<|VISION_END|>")
    template = chat("".join(media))
    tokenizer = vocabulary(template, *media, "<|VIDEO_PAD|>")
    start, image, end, video = ids(tokenizer, *media, "<|VIDEO_PAD|>")
    config = hf.CohereCompassConfig(
        text_config=decoder(
            tokenizer, layer_types=["sliding_attention"] * 2 + ["full_attention"],
            sliding_window=64, rope_parameters={"sliding_attention": dict(MROPE)},
            tie_word_embeddings=True,
        ),
        vision_config=tower(
            16, num_position_embeddings=48**2, deepstack_visual_indexes=list(range(VISION_LAYERS))
        ),
        image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end,
        tie_word_embeddings=True, architectures=["CohereCompassForConditionalGeneration"],
    )  # fmt: skip
    processor = hf.CohereCompassProcessor(
        hf.CohereCompassImageProcessor(**geometry(16)),
        tokenizer,
        hf.CohereCompassVideoProcessor(**geometry(16)),
        chat_template=template,
    )
    return Tiny(config, tokenizer, processor)


@dataclass(frozen=True)
class _Tekken:
    """Mistral's tokenizer, which is one file."""

    words: list[str]
    special: list[str]
    media: Settings

    @property
    def eos_token_id(self) -> int:
        return self.special.index("</s>")

    @property
    def pad_token_id(self) -> int:
        return self.special.index("<pad>")

    def __len__(self) -> int:
        return 256 + len(self.words) + len(self.special)

    def save_pretrained(self, directory: Path) -> None:
        pieces = [bytes([byte]) for byte in range(256)] + [word.encode() for word in self.words]
        content = {
            "config": {
                "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+",
                "num_vocab_tokens": len(pieces),
                "default_vocab_size": len(self),
                "default_num_special_tokens": len(self.special),
                "version": "v7",
            },
            "vocab": [
                {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
                for rank, piece in enumerate(pieces)
            ],
            "special_tokens": [
                {"rank": rank, "token_str": token, "is_control": True}
                for rank, token in enumerate(self.special)
            ],
            **self.media,
        }
        (directory / "tekken.json").write_text(json.dumps(content))


def _tekken(**media: Any) -> _Tekken:
    from mistral_common.tokens.tokenizers.base import SpecialTokens
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    learnt = json.loads(vocabulary(chat()).backend_tokenizer.to_str())["model"]["merges"]
    words = ["".join(pair).replace("Ġ", " ").replace("Ċ", "\n") for pair in learnt]
    first = [str(token["token_str"]) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    others = [token.value for token in SpecialTokens if token.value not in first]
    return _Tekken(list(dict.fromkeys(words)), first + others, media)


def _mistral(architecture: str, tokenizer: _Tekken, **media: Any) -> Tiny:
    params = {
        "dim": HIDDEN, "hidden_dim": 2 * HIDDEN, "n_layers": LAYERS, "n_heads": HEADS,
        "n_kv_heads": HEADS, "head_dim": HEAD, "norm_eps": 1e-5, "rope_theta": 1e6,
        "vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS, "dtype": "float32",
        **media,
    }  # fmt: skip
    files = {
        "params.json": json.dumps(params, indent=1),
        # By a file of this name, vLLM knows the format. It has no tensor.
        "consolidated.safetensors": "\2\0\0\0\0\0\0\0{}",
    }
    return Tiny({"architectures": [architecture]}, tokenizer, files=files)


def pixtral() -> Tiny:
    """Pixtral as Mistral has it: images are cut by the tokenizer, patches merged by two."""
    image = {"image_patch_size": PATCH, "max_image_size": 2 * SIDE, "spatial_merge_size": 2}
    tokenizer = _tekken(image=image)
    eye = vision(
        num_channels=3, image_size=2 * SIDE, rope_theta=1e4, adapter_bias=False,
        image_token_id=tokenizer.special.index("[IMG]"), spatial_merge_size=2,
        add_pre_mm_projector_layer_norm=True, mm_projector_id="patch_merge",
    )  # fmt: skip
    return _mistral("PixtralForConditionalGeneration", tokenizer, vision_encoder=eye)


def voxtral() -> Tiny:
    """Voxtral: pieces of sound of one length, in Mistral's format."""
    seconds, rate, per_second, bins = 2, 16_000, 12.5, 32
    spectrogram = {"num_mel_bins": bins, "hop_length": 160, "window_size": 400}
    audio = {
        "sampling_rate": rate, "frame_rate": per_second, "chunk_length_s": seconds,
        "audio_encoding_config": spectrogram,
    }  # fmt: skip
    tokenizer = _tekken(audio=audio)
    ear = {
        "audio_encoding_args": {"sampling_rate": rate, **spectrogram},
        "dim": HIDDEN, "n_layers": VISION_LAYERS, "n_heads": HEADS, "head_dim": HEAD,
        "hidden_dim": 2 * HIDDEN, "vocab_size": len(tokenizer),
        "max_source_positions": 50 * seconds,
    }  # fmt: skip
    heard = {"encoder_args": ear, "downsample_args": {"downsample_factor": 4}}
    multimodal = {"whisper_model_args": heard}
    return _mistral("VoxtralForConditionalGeneration", tokenizer, multimodal=multimodal)
