"""InternVL's chat models and their kin, whose configuration is code of the model's own."""

from typing import Any

from tests.families.makers.base import SIDE, Settings, Tiny, chat, decoder, vision, vocabulary

CODE = """\
from transformers import AutoConfig, PretrainedConfig


class ChatConfig(PretrainedConfig):
    model_type = "tiny_chat"
    is_composition = True

    def __init__(self, vision_config=None, text_config=None, **more):
        eye = dict(vision_config or {"model_type": "siglip_vision_model"})
        known = eye.get("model_type") == "siglip_vision_model"
        self.vision_config = AutoConfig.for_model(**eye) if known else PretrainedConfig(**eye)
        self.text_config = AutoConfig.for_model(**(text_config or {"model_type": "qwen2"}))
        super().__init__(**more)
"""


def _chat(architecture: str, eye: Settings, *special: str, image: str = "<image>",
          text: str = "qwen2", **more: Any) -> Tiny:  # fmt: skip
    tokenizer = vocabulary(chat(image, "<video>"), "<img>", "</img>", "<IMG_CONTEXT>", *special)
    config = {
        "architectures": [architecture],
        "model_type": "tiny_chat",
        "auto_map": {"AutoConfig": "configuration_chat.ChatConfig"},
        "vision_config": eye,
        "text_config": decoder(tokenizer, text, architectures=_LANGUAGES[text]),
        "dtype": "float32",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": SIDE,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 4,
        "ps_version": "v2",
        "select_layer": -1,
        "use_thumbnail": True,
        **more,
    }
    if not config["auto_map"]:
        del config["auto_map"]
        return Tiny(config, tokenizer)
    return Tiny(config, tokenizer, files={"configuration_chat.py": CODE})


_LANGUAGES = {
    "qwen2": ["Qwen2ForCausalLM"],
    "mistral": ["MistralForCausalLM"],
    "qwen3": ["Qwen3ForCausalLM"],
}


def _intern_vit(**more: Any) -> Settings:
    return vision(
        "intern_vit_6b", hidden_act="gelu", initializer_factor=0.1, initializer_range=0.02,
        layer_norm_eps=1e-6, norm_type="layer_norm", qk_normalization=False, qkv_bias=True, **more,
    )  # fmt: skip


def intern_vl_chat() -> Tiny:
    """InternVL 2.5 and 3: tiles and a thumbnail; videos."""
    return _chat("InternVLChatModel", _intern_vit(), "<|video_pad|>")


def h2o_vl() -> Tiny:
    """H2OVL: a lone image is tiled more than one of several."""
    return _chat("H2OVLChatModel", _intern_vit(), text="mistral", use_msac=True)


def skywork_r1v() -> Tiny:
    """Skywork R1V."""
    return _chat("SkyworkR1VChatModel", _intern_vit())


def nvlm_d() -> Tiny:
    """NVLM-D: the names of its tiles between them."""
    return _chat("NVLM_D", _intern_vit(), "<Image>", "</Image>", image="{{- '<image>\\n' -}}")


def eagle2_5_vl() -> Tiny:
    """Eagle 2.5: SigLIP's encoder."""
    eye = vision("siglip_vision_model", vision_use_head=False)
    return _chat("Eagle2_5_VLForConditionalGeneration", eye)


def qianfan_ocr() -> Tiny:
    """Qianfan-OCR: the same under Qwen3, with a configuration that vLLM knows."""
    known: Settings = {"model_type": "qianfan_ocr", "auto_map": {}}
    return _chat("QianfanOCRForConditionalGeneration", _intern_vit(), text="qwen3", **known)
