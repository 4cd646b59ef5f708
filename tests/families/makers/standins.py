"""Models whose configuration is code of their repository, for which a few lines stand in here."""

import json
from typing import Any

import tokenizers
import transformers as hf

from tests.families.makers.base import (
    EXPERTS,
    HEAD,
    HEADS,
    HIDDEN,
    SIDE,
    VISION_LAYERS,
    Settings,
    Tiny,
    chat,
    decoder,
    ids,
    square,
    vision,
    vocabulary,
)
from tests.families.makers.processors import STEP_TOKENS

CODE = """\
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig


def part(settings):
    kind = settings.get("model_type")
    # Step's has another form in its repository than in transformers.
    if kind in CONFIG_MAPPING and kind != "step3p5":
        return AutoConfig.for_model(**settings)
    return PretrainedConfig(**settings)


class StandIn(PretrainedConfig):
    model_type = "tiny_stand_in"

    def __init__(self, **more):
        for name in ("text_config", "vision_config", "vit_config"):
            if settings := more.pop(name, None):
                setattr(self, name, part(settings))
        super().__init__(**more)
"""


def _stand_in(architecture: str, tokenizer: Any, processor: Any = None, **more: Any) -> Tiny:
    config = {
        "architectures": [architecture],
        "model_type": "tiny_stand_in",
        "auto_map": {"AutoConfig": "configuration_stand_in.StandIn"},
        "dtype": "float32",
        **more,
    }
    return Tiny(config, tokenizer, processor, files={"configuration_stand_in.py": CODE})


def _wide(tokenizer: Any, token: str, at: int) -> Any:
    """The same with as many words that no text has before its special tokens that one of these has
    the id that is fixed in vLLM's code."""
    learnt = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    added = dict(sorted(tokenizer.added_tokens_decoder.items()))
    words = dict(learnt["vocab"])
    first = at - (ids(tokenizer, token)[0] - min(added))
    words |= {f"w{number}": number for number in range(len(words), first)}
    wide = hf.Qwen2Tokenizer(
        vocab=words,
        merges=[tuple(pair) for pair in learnt["merges"]],
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        model_max_length=tokenizer.model_max_length,
    )
    wide.add_tokens(
        [tokenizers.AddedToken(each.content, special=each.special) for each in added.values()]
    )
    wide.chat_template = tokenizer.chat_template
    assert ids(wide, token) == [at]
    return wide


OVIS_TOKENS = (
    "<image>", "<video>", "<ovis_visual_atom>", "<|image_pad|>",
    "<ovis_image_start>", "<ovis_image_end>", "<ovis_video_start>", "<ovis_video_end>",
)  # fmt: skip


def _ovis(architecture: str, kind: str, language: str, **more: Any) -> Tiny:
    from vllm.transformers_utils.processors.ovis2_5 import Ovis2_5Processor

    template = chat("<image>", "<video>")
    tokenizer = _wide(vocabulary(template, *OVIS_TOKENS), "<ovis_image_start>", 151672)
    sizes: Settings = {"patch_size": 28, "hidden_stride": 2, "temporal_patch_size": 1}
    eye = vision(
        "siglip2_navit", num_channels=3, num_patches=-1, attention_dropout=0.0, hidden_act="gelu",
        layer_norm_eps=1e-6, window_size=112, fullatt_block_indexes=str(VISION_LAYERS - 1),
        preserve_original_pe=True, use_rope=True, **sizes | {"image_size": 448},
    )  # fmt: skip
    text = decoder(tokenizer, kind, architectures=[language], **more)
    pictures = hf.SiglipImageProcessor(size=square())
    processor = Ovis2_5Processor(pictures, tokenizer, chat_template=template, **sizes)
    return _stand_in(
        architecture, tokenizer, processor, text_config=text, vit_config=eye,
        visual_vocab_size=256, hidden_size=HIDDEN,
    )  # fmt: skip


def ovis2_5() -> Tiny:
    """Ovis 2.5: images of any size as words of a visual vocabulary; a single video."""
    return _ovis("Ovis2_5", "qwen3", "Qwen3ForCausalLM")


def ovis2_6() -> Tiny:
    """Ovis 2.6: the same under another name."""
    return _ovis("Ovis2_6ForCausalLM", "qwen3", "Qwen3ForCausalLM")


def ovis2_6_moe() -> Tiny:
    """Ovis 2.6 with experts."""
    return _ovis("Ovis2_6_MoeForCausalLM", "qwen3_moe", "Qwen3MoeForCausalLM", **EXPERTS)


def _step(architecture: str, tokenizer: Any, text: Settings) -> Tiny:
    width = HIDDEN // 2
    eye = {
        "width": width, "layers": VISION_LAYERS, "heads": 1, "mlp_ratio": 2.0, "patch_size": 14,
        "image_size": 728, "output_dim": None, "hidden_act": "quick_gelu", "ls_init_value": 0.1,
        "use_abs_posemb": True, "use_cls_token": False, "use_rope2d": True, "use_ln_pre": True,
        "use_ln_post": False,
    }  # fmt: skip
    return _stand_in(
        architecture, tokenizer, text_config=text, vision_config=eye, projector_bias=False,
        hidden_size=HIDDEN, image_token_id=ids(tokenizer, "<im_patch>")[0],
    )  # fmt: skip


def step_vl() -> Tiny:
    """Step3-VL-10B: Step3's windows, a perception encoder, Qwen3."""
    tokenizer = vocabulary(chat("<im_patch>"), *STEP_TOKENS)
    text = decoder(tokenizer, "qwen3", architectures=["Qwen3ForCausalLM"])
    return _step("StepVLForConditionalGeneration", tokenizer, text)


def step3p7() -> Tiny:
    """Step-3.7: the same over experts, with gates on heads and a window on every other layer."""
    tokenizer = vocabulary(chat("<im_patch>"), *STEP_TOKENS)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    text = decoder(
        tokenizer, "step3p5", architectures=["Step3p5ForCausalLM"], layer_types=kinds,
        sliding_window=64, num_attention_groups=1, use_head_wise_attn_gate=True,
        attention_other_setting={
            "attention_type": "sliding_attention", "num_attention_heads": 2 * HEADS,
            "num_attention_groups": 1, "head_dim": HEAD,
        },
        moe_layers_enum="1,2", moe_num_experts=4, moe_top_k=2, moe_intermediate_size=HIDDEN,
        moe_router_activation="softmax",  # vLLM has no other on CPUs
        moe_router_scaling_factor=1.0, use_moe_router_bias=True, need_fp32_gate=True,
        norm_expert_weight=True, share_expert_dim=HIDDEN, swiglu_limits=None,
        swiglu_limits_shared=None, att_impl_type="GQA", rms_norm_eps=1e-5, rope_theta=5e5,
    )  # fmt: skip
    del text["num_key_value_heads"]
    return _step("Step3p7ForConditionalGeneration", tokenizer, text)


def phi4_siglip() -> Tiny:
    """Phi-4-reasoning-vision: "<image>" is no token, but text. SigLIP 2's processor, which gives
    the same, stands in for its own."""
    template = chat("<image>")
    tokenizer = _wide(vocabulary(template, "<|dummy_0|>"), "<|dummy_0|>", 100256)
    eye = vision("siglip2_vision_model", patch_size=16, num_patches=256, vision_use_head=False)
    pictures = hf.Siglip2ImageProcessor(patch_size=16, max_num_patches=256)
    text = decoder(tokenizer, rms_norm_eps=1e-5, hidden_act="silu", rope_theta=1e4)
    return _stand_in(
        "Phi4ForCausalLMV", tokenizer, hf.Siglip2Processor(pictures, tokenizer),
        vision_config=eye, mm_hidden_size=HIDDEN, max_num_patches=256, min_num_patches=16, **text,
    )  # fmt: skip


TILES_CODE = """\
from types import SimpleNamespace

from torch import nn
from transformers import AutoConfig, BaseImageProcessor, PreTrainedConfig, PreTrainedModel


class EyeConfig(PreTrainedConfig):
    model_type = "tiny_eye"


class Eye(PreTrainedModel):
    config_class = EyeConfig

    def __init__(self, config):
        super().__init__(config)
        self.patches = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.post_init()

    def forward(self, x):
        seen = self.patches(2 * x.to(self.patches.weight.dtype) - 1)
        return SimpleNamespace(features=seen.flatten(2).transpose(1, 2).contiguous())


class StandIn(PreTrainedConfig):
    model_type = "tiny_tiles"

    def __init__(self, text_config=None, vision_config=None, **more):
        self.text_config = AutoConfig.for_model(**(text_config or {"model_type": "llama"}))
        self.vision_config = EyeConfig(**(vision_config or {}))
        super().__init__(**more)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "name_or_path":
            self.vision_config.name_or_path = value


class Tiles(BaseImageProcessor):
    pass
"""


def nemotron_nano_vl() -> Tiny:
    """Llama Nemotron Nano VL: tiles by another rule than InternVL's. Its encoder is code of its
    repository, too, for which a convolution stands in."""
    tokenizer = vocabulary(chat("<image>"), "<image>", "<img>", "</img>")
    config = {
        "architectures": ["Llama_Nemotron_Nano_VL"],
        "model_type": "tiny_tiles",
        "auto_map": {"AutoConfig": "configuration_tiles.StandIn"},
        "dtype": "float32",
        "text_config": decoder(tokenizer, "llama", architectures=["LlamaForCausalLM"]),
        "vision_config": vision(auto_map={"AutoModel": "configuration_tiles.Eye"}),
        "force_image_size": SIDE,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "vit_hidden_size": HIDDEN,
        "projector_hidden_size": HIDDEN,
    }
    tiles = {
        "image_processor_type": "Tiles",
        "auto_map": {"AutoImageProcessor": "configuration_tiles.Tiles"},
        "image_size": SIDE,
        "max_num_tiles": 4,
        "use_thumbnail": True,
    }
    files = {"configuration_tiles.py": TILES_CODE, "preprocessor_config.json": json.dumps(tiles)}
    return Tiny(config, tokenizer, files=files)
