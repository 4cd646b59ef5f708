"""Models that see, whose processors are vLLM's own."""

import json
from typing import Any

import transformers as hf

from tests.families.makers.base import (
    HEADS,
    HIDDEN,
    LAYERS,
    Settings,
    Tiny,
    chat,
    decoder,
    ids,
    vocabulary,
)

CODE = """\
from transformers import AutoConfig, PretrainedConfig


class OmniConfig(PretrainedConfig):
    model_type = "tiny_omni"
    is_composition = True

    def __init__(self, text_config=None, vision_config=None, sound_config=None, **more):
        self.text_config = AutoConfig.for_model(**(text_config or {"model_type": "nemotron_h"}))
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        if sound_config is not None:
            self.sound_config = PretrainedConfig(**sound_config)
        super().__init__(**more)
"""


def _deepseek_ocr(architecture: str, width: int) -> Tiny:
    """The sizes of the encoders stand in vLLM's code."""
    tokenizer = vocabulary(chat("<image>"), "<image>")
    tokenizer.bos_token = "<|endoftext|>"
    config = {
        "architectures": [architecture],
        "model_type": "deepseek_vl_v2",
        "dtype": "float32",
        "tile_tag": "2D",
        "global_view_pos": "head",
        "vision_config": {"image_size": 1024},
        "projector_config": {
            "projector_type": "linear", "input_dim": width, "n_embed": HIDDEN,
        },
        "language_config": decoder(
            tokenizer, "deepseek_v2", architectures=["DeepseekV2ForCausalLM"],
            use_mla=False, qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0,
            kv_lora_rank=None, q_lora_rank=None, n_routed_experts=4, n_shared_experts=1,
            num_experts_per_tok=2, moe_intermediate_size=HIDDEN, first_k_dense_replace=1,
            moe_layer_freq=1, n_group=1, topk_group=1, topk_method="greedy",
        ),
    }  # fmt: skip
    return Tiny(config, tokenizer)


def deepseek_ocr() -> Tiny:
    """DeepSeek-OCR: SAM and CLIP, one after the other, and experts without latent attention."""
    return _deepseek_ocr("DeepseekOCRForCausalLM", 2048)


def deepseek_ocr2() -> Tiny:
    """DeepSeek-OCR 2: a language model in CLIP's place."""
    return _deepseek_ocr("DeepseekOCR2ForCausalLM", 896)


def _reserved_first(template: str, *special: str) -> Any:
    """A tokenizer that begins with the tokens whose ids stand in Moondream's code."""
    first = ("<|endoftext|>", "<|md_reserved_0|>", "<|md_reserved_1|>", "<|md_reserved_2|>")
    usual = vocabulary(template)
    learnt = json.loads(usual.backend_tokenizer.to_str())["model"]
    tokens = (*first, *learnt["vocab"])
    tokenizer = hf.Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(pair) for pair in learnt["merges"]],
        eos_token=first[0],
        pad_token=first[0],
        model_max_length=usual.model_max_length,
    )
    more = ("<|im_start|>", "<|im_end|>", *special)
    tokenizer.add_special_tokens({"additional_special_tokens": [*first[1:], *more]})
    tokenizer.chat_template = template
    return tokenizer


def _moondream(architecture: str) -> Tiny:
    tokenizer = _reserved_first(chat("<|endoftext|><image>"), "<image>")
    config = {
        "architectures": [architecture],
        "model_type": "moondream3",
        "dtype": "float32",
        "config": {
            "text": {
                "dim": HIDDEN, "ff_dim": 2 * HIDDEN, "n_layers": LAYERS, "n_heads": HEADS,
                "n_kv_heads": HEADS, "vocab_size": len(tokenizer), "max_context": 32768,
                "moe": {
                    "start_layer": 1, "n_experts": 4, "n_experts_per_tok": 2,
                    "expert_inner_dim": HIDDEN,
                },
            },
            "vision": {
                # As many layers as a side has patches: vLLM pools to the number of layers.
                "enc_dim": 32, "enc_ff_dim": 64, "enc_n_layers": 27, "enc_n_heads": 2,
                "proj_inner_dim": 2 * HIDDEN,
            },
        },
    }  # fmt: skip
    return Tiny(config, tokenizer)


def moondream3() -> Tiny:
    """Moondream 3: one image, seen whole and in overlapping crops, at a fixed length."""
    return _moondream("Moondream3ForCausalLM")


def hf_moondream() -> Tiny:
    """The same under the name that its checkpoints have."""
    return _moondream("HfMoondream")


_OMNI = ("<img>", "</img>", "<image>", "<video>", "<so_start>", "<so_end>", "<so_embedding>")
_SOUND: Settings = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "intermediate_size": 2 * HIDDEN, "num_mel_bins": 32,
    "subsampling_conv_channels": 32, "subsampling_factor": 8, "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2, "projection_hidden_size": HIDDEN, "projection_bias": False,
    "sampling_rate": 16000,
}  # fmt: skip


def _nemotron(architecture: str, **sound: Any) -> Tiny:
    """RADIO's encoder has no smaller size than this."""
    heard = "<so_embedding>" if sound else ""
    tokenizer = vocabulary(chat("<image>", "<video>", heard), *_OMNI)
    side = 128
    text = decoder(
        tokenizer, "nemotron_h", dtype="bfloat16", architectures=["NemotronHForCausalLM"],
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        mamba_num_heads=4, mamba_head_dim=64, n_groups=1, ssm_state_size=32, chunk_size=64,
    )  # fmt: skip
    del text["num_hidden_layers"]
    config = {
        "architectures": [architecture],
        "model_type": "tiny_omni",
        "auto_map": {"AutoConfig": "configuration_omni.OmniConfig"},
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": {
            "patch_size": 16,
            "preferred_resolution": [side, side],
            "args": {
                "model": "vit_small_patch16_224", "cpe_max_size": 2 * side,
                "teachers": [{"name": "one"}],
            },
        },
        "img_context_token_id": ids(tokenizer, "<image>")[0],
        "vit_hidden_size": 384, "projector_hidden_size": 2 * HIDDEN,
        "force_image_size": side, "patch_size": 16, "downsample_ratio": 0.5,
        "use_thumbnail": True, "ps_version": "v2", "image_tag_type": "internvl", "template": "",
        "norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5],
        **sound,
    }  # fmt: skip
    return Tiny(config, tokenizer, files={"configuration_omni.py": CODE})


def nemotron_h_nano_vl() -> Tiny:
    """Nemotron Nano VL 2: RADIO's encoder, Mamba beside attention."""
    return _nemotron("NemotronH_Nano_VL_V2")


def nemotron_nano_omni() -> Tiny:
    """Nemotron Nano Omni 3: the same with Parakeet's encoder."""
    return _nemotron("NemotronH_Nano_Omni_Reasoning_V3", sound_config=_SOUND)


def nemotron_super_omni() -> Tiny:
    """The same under another name."""
    return _nemotron("NemotronH_Super_Omni_Reasoning_V3", sound_config=_SOUND)


def nemotron_omni() -> Tiny:
    """The same under another name."""
    return _nemotron("NemotronH_Omni_Reasoning_V3", sound_config=_SOUND)


_KIMI = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")


def kimi_k25() -> Tiny:
    """Kimi K2.5: images and pieces of videos are one kind of medium, under latent attention."""
    begin, content, pad, end = _KIMI
    placeholder = f"{begin}image{content}{pad}{end}"
    tokenizer = vocabulary(
        chat(placeholder, "<|kimi_k25_video_placeholder|>"),
        *_KIMI,
        "<|kimi_k25_video_placeholder|>",
    )
    start, image, stop = ids(tokenizer, begin, pad, end)
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "use_unified_vision_chunk": True,
        "image_token_id": image, "vision_start_token_id": start, "vision_end_token_id": stop,
        "projection_hidden_size": HIDDEN,
        "vision_config": {
            "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2,
            "num_attention_heads": HEADS, "pos_emb_height": 16, "pos_emb_width": 16,
        },
        # The one size of latent attention that vLLM has for a CPU.
        "text_config": decoder(
            tokenizer, "deepseek_v3", q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=64,
            qk_rope_head_dim=64, v_head_dim=64, n_routed_experts=4, n_shared_experts=1,
            num_experts_per_tok=2, moe_intermediate_size=HIDDEN, first_k_dense_replace=1,
            n_group=1, topk_group=1,
        ),
    }  # fmt: skip
    pictures = {
        "media_proc_cfg": {
            "patch_size": 14, "merge_kernel_size": 2, "temporal_merge_kernel_size": 4,
            "in_patch_limit": 256, "in_patch_limit_each_frame": 64, "in_patch_limit_video": 512,
            "patch_limit_on_one_side": 64, "fixed_output_tokens": None,
            "max_num_frames_each_video": None, "sample_fps": 2.0, "timestamp_mode": "hh:mm:ss.fff",
            "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        },
    }  # fmt: skip
    return Tiny(config, tokenizer, files={"preprocessor_config.json": json.dumps(pictures)})
