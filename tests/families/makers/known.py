"""Models whose configuration is vLLM's own, and MiniCPM-V."""

from typing import Any

import transformers as hf

from tests.families.makers.base import (
    HIDDEN,
    MROPE,
    PATCH,
    SIDE,
    Settings,
    Tiny,
    chat,
    decoder,
    ears,
    ids,
    vision,
    vocabulary,
)
from tests.families.makers.qwens import linear, qwen2_5_vl, qwen3_5_moe
from tests.families.makers.tiles import internvl_hf


def intern_s1() -> Tiny:
    """Intern-S1: InternVL as Hugging Face has it, under another name."""
    tiny = internvl_hf()
    name = "InternS1ForConditionalGeneration"
    return Tiny(tiny.config, tiny.tokenizer, tiny.processor, architecture=name)


def intern_s2_preview() -> Tiny:
    """Intern-S2 Preview: Qwen3.5 with experts under another name."""
    tiny = qwen3_5_moe()
    name = "InternS2PreviewForConditionalGeneration"
    return Tiny(tiny.config, tiny.tokenizer, tiny.processor, architecture=name)


def open_cua() -> Tiny:
    """OpenCUA: Qwen2.5-VL's encoder, a placeholder of its own, no videos."""
    tiny = qwen2_5_vl()
    template = chat("<|media_placeholder|>")
    tokenizer = vocabulary(template, "<|media_placeholder|>", "<|video_pad|>")
    image, video = ids(tokenizer, "<|media_placeholder|>", "<|video_pad|>")
    tiny.config.image_token_id, tiny.config.video_token_id = image, video
    name = "OpenCUAForConditionalGeneration"
    return Tiny(tiny.config, tokenizer, tiny.processor.image_processor, architecture=name)


def qwen3_asr() -> Tiny:
    """Qwen3-ASR: Qwen3-Omni's ears alone."""
    names = {
        "audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }  # fmt: skip
    template = chat(audio="<|audio_start|><|audio_pad|><|audio_end|>")
    tokenizer = vocabulary(template, **names)
    audio, start, _ = ids(tokenizer, *names.values())
    config = {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "dtype": "float32",
        "thinker_config": {
            "audio_config": ears(
                output_dim=HIDDEN, downsample_hidden_size=32, n_window=50, n_window_infer=200
            ),
            "text_config": decoder(tokenizer, rope_scaling=MROPE | {"mrope_interleaved": True}),
            "audio_token_id": audio,
            "audio_start_token_id": start,
        },
    }
    ear = hf.WhisperFeatureExtractor(feature_size=32)
    processor = hf.Qwen3ASRProcessor(ear, tokenizer, chat_template=template)
    return Tiny(config, tokenizer, processor)


def ovis() -> Tiny:
    """Ovis 2: images as words of a visual vocabulary."""
    template = chat("<image>")
    tokenizer = vocabulary(template, "<image>", "<|image_pad|>")
    config = {
        "architectures": ["Ovis"],
        "model_type": "ovis",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "llm_config": decoder(tokenizer, "qwen2", architectures=["Qwen2ForCausalLM"]),
        "visual_tokenizer_config": {
            "model_type": "siglip_visual_tokenizer", "vocab_size": 256, "hidden_stride": 2,
            "backbone_config": vision("siglip_vision_model", vision_use_head=False),
        },
    }  # fmt: skip
    from vllm.transformers_utils.processors.ovis import OvisProcessor

    size = {"shortest_edge": SIDE, "height": SIDE, "width": SIDE}
    pictures = hf.SiglipImageProcessor(size={"height": size["height"], "width": size["width"]})
    return Tiny(config, tokenizer, OvisProcessor(pictures, tokenizer, chat_template=template))


_CPM = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
    "image_start_token": "<image>", "image_end_token": "</image>",
    "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip


def _mini_cpm(version: str, **more: Any) -> Tiny:
    template = chat(_CPM["image_token"], _CPM["video_token"])
    tokenizer = vocabulary(template, **_CPM)
    image, video = ids(tokenizer, _CPM["image_token"], _CPM["video_token"])
    eye = vision(image_size=SIDE, patch_size=PATCH, insert_layer_id=0)
    config = getattr(hf, f"MiniCPMV{version}Config")(
        text_config=linear(tokenizer, model_type="qwen3_5_text"),
        vision_config=eye,
        insert_layer_id=0,
        image_size=SIDE,
        image_token_id=image,
        video_token_id=video,
        architectures=[f"MiniCPMV{version}ForConditionalGeneration"],
        **more,
    )
    sizes: Settings = {"scale_resolution": SIDE, "patch_size": PATCH, "max_slice_nums": 4}
    processor = getattr(hf, f"MiniCPMV{version}Processor")(
        hf.MiniCPMV4_6ImageProcessor(**sizes),
        hf.MiniCPMV4_6VideoProcessor(max_num_frames=8, **sizes),
        tokenizer,
        chat_template=template,
    )
    return Tiny(config, tokenizer, processor)


def mini_cpm_v4_6() -> Tiny:
    """MiniCPM-V 4.6: slices with numbers before them, over linear attention."""
    return _mini_cpm("4_6")


def mini_cpm_v4_7() -> Tiny:
    """MiniCPM-V 4.7: M-RoPE over the slices."""
    return _mini_cpm("4_7")
