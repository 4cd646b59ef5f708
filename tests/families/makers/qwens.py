"""Qwen's families and those that follow them: M-RoPE, windows, deepstack, timestamps."""

from typing import Any

import transformers as hf

from tests.families.makers.base import (
    EXPERTS,
    HIDDEN,
    MROPE,
    VISION_LAYERS,
    Settings,
    Tiny,
    chat,
    decoder,
    ears,
    ids,
    tower,
    vocabulary,
)

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = chat(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
)
INTERLEAVED = MROPE | {"mrope_interleaved": True}


def geometry(patch: int) -> Settings:
    unit = patch * 2
    size = {"shortest_edge": (2 * unit) ** 2, "longest_edge": (37 * unit) ** 2}
    return {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "size": size}


def media_ids(tokenizer: Any) -> dict[str, int]:
    start, end, image, video = ids(tokenizer, *VISION_TOKENS)
    return {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }


def qwen2_vl_parts(processor: Any, patch: int = 14) -> tuple[Any, Any]:
    """A tokenizer, and a processor of a class that takes Qwen2-VL's parts."""
    tokenizer = vocabulary(TEMPLATE, *VISION_TOKENS)
    pictures = hf.Qwen2VLImageProcessor(**geometry(patch))
    films = hf.Qwen2VLVideoProcessor(**geometry(patch))
    return tokenizer, processor(pictures, tokenizer, films, chat_template=TEMPLATE)


def qwen2_vl() -> Tiny:
    """Qwen2-VL: any number of patches, M-RoPE."""
    tokenizer, processor = qwen2_vl_parts(hf.Qwen2VLProcessor)
    eye: Settings = {
        "depth": VISION_LAYERS, "embed_dim": HIDDEN, "hidden_size": HIDDEN, "num_heads": 2,
        "mlp_ratio": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    config = hf.Qwen2VLConfig(
        text_config=decoder(tokenizer, rope_parameters=MROPE),
        vision_config=eye,
        architectures=["Qwen2VLForConditionalGeneration"],
        **media_ids(tokenizer),
    )
    return Tiny(config, tokenizer, processor)


def qwen2_5_vl() -> Tiny:
    """Qwen2.5-VL: windows in the encoder, seconds in a video's positions."""
    tokenizer, processor = qwen2_vl_parts(hf.Qwen2_5_VLProcessor)
    windows: Settings = {"window_size": 4 * 28, "fullatt_block_indexes": [VISION_LAYERS - 1]}
    config = hf.Qwen2_5_VLConfig(
        text_config=decoder(tokenizer, rope_parameters=MROPE),
        vision_config=tower(**windows),
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **media_ids(tokenizer),
    )
    return Tiny(config, tokenizer, processor)


def _qwen3_parts(tokenizer: Any) -> tuple[Settings, Any]:
    eye = tower(
        16, num_position_embeddings=48**2, deepstack_visual_indexes=list(range(VISION_LAYERS))
    )
    processor = hf.Qwen3VLProcessor(
        hf.Qwen2VLImageProcessor(**geometry(16)),
        tokenizer,
        hf.Qwen3VLVideoProcessor(**geometry(16)),
        chat_template=TEMPLATE,
    )
    return eye, processor


def qwen3_vl() -> Tiny:
    """Qwen3-VL: deepstack; a timestamp before each frame."""
    tokenizer = vocabulary(TEMPLATE, *VISION_TOKENS)
    eye, processor = _qwen3_parts(tokenizer)
    config = hf.Qwen3VLConfig(
        text_config=decoder(tokenizer, rope_parameters=INTERLEAVED),
        vision_config=eye,
        tie_word_embeddings=False,
        architectures=["Qwen3VLForConditionalGeneration"],
        **media_ids(tokenizer),
    )
    return Tiny(config, tokenizer, processor)


def qwen3_vl_moe() -> Tiny:
    """Qwen3-VL with experts."""
    tokenizer = vocabulary(TEMPLATE, *VISION_TOKENS)
    eye, processor = _qwen3_parts(tokenizer)
    config = hf.Qwen3VLMoeConfig(
        text_config=decoder(tokenizer, rope_parameters=INTERLEAVED, norm_topk_prob=True, **EXPERTS),
        vision_config=eye,
        tie_word_embeddings=False,
        architectures=["Qwen3VLMoeForConditionalGeneration"],
        **media_ids(tokenizer),
    )
    return Tiny(config, tokenizer, processor)


def linear(tokenizer: Any, **more: Any) -> Settings:
    """Configuration of a language model of which one layer in four has attention."""
    return decoder(
        tokenizer,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        rope_parameters=INTERLEAVED | {"partial_rotary_factor": 1.0},
        **more,
    )


def qwen3_5() -> Tiny:
    """Qwen3.5: gated delta nets beside attention, under a vision model."""
    tokenizer = vocabulary(TEMPLATE, *VISION_TOKENS)
    eye, processor = _qwen3_parts(tokenizer)
    del eye["deepstack_visual_indexes"]
    config = hf.Qwen3_5Config(
        text_config=linear(tokenizer),
        vision_config=eye,
        tie_word_embeddings=False,
        architectures=["Qwen3_5ForConditionalGeneration"],
        **media_ids(tokenizer),
    )
    return Tiny(config, tokenizer, processor)


def qwen3_5_moe() -> Tiny:
    """Qwen3.5 with experts."""
    tokenizer = vocabulary(TEMPLATE, *VISION_TOKENS)
    eye, processor = _qwen3_parts(tokenizer)
    del eye["deepstack_visual_indexes"]
    shared = EXPERTS | {"shared_expert_intermediate_size": HIDDEN}
    config = hf.Qwen3_5MoeConfig(
        text_config=linear(tokenizer, **shared),
        vision_config=eye,
        tie_word_embeddings=False,
        architectures=["Qwen3_5MoeForConditionalGeneration"],
        **media_ids(tokenizer),
    )
    return Tiny(config, tokenizer, processor)


def qwen2_audio() -> Tiny:
    """Qwen2-Audio: sound alone."""
    template = chat(audio="<|audio_bos|><|AUDIO|><|audio_eos|>")
    tokenizer = vocabulary(template, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    config = hf.Qwen2AudioConfig(
        audio_config=ears(),
        text_config=decoder(tokenizer, "qwen2"),
        audio_token_index=ids(tokenizer, "<|AUDIO|>")[0],
        architectures=["Qwen2AudioForConditionalGeneration"],
    )
    processor = hf.Qwen2AudioProcessor(
        hf.WhisperFeatureExtractor(feature_size=32), tokenizer, chat_template=template
    )
    return Tiny(config, tokenizer, processor)


OMNI = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
HEARING = "<|audio_start|><|audio_pad|><|audio_end|>"
OMNI_TEMPLATE = chat(
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
    HEARING,
)


def qwen3_omni() -> Tiny:
    """Qwen3-Omni's thinker: pictures, films and sound, with experts and deepstack."""
    tokenizer = vocabulary(OMNI_TEMPLATE, **OMNI)
    eye, pictures = _qwen3_parts(tokenizer)
    image, video, audio, start, end, audio_start, audio_end, user = ids(
        tokenizer, *OMNI.values(), "user"
    )
    eye |= {"image_size": 48 * 16, "apply_vit_abs_pos_embed": True}
    thinker = hf.Qwen3OmniMoeThinkerConfig(
        text_config=decoder(tokenizer, rope_parameters=INTERLEAVED, **EXPERTS),
        vision_config=eye,
        audio_config=ears(output_dim=HIDDEN, downsample_hidden_size=32, n_window=50,
                          n_window_infer=200),
        image_token_id=image, video_token_id=video, audio_token_id=audio,
        vision_start_token_id=start, vision_end_token_id=end,
        audio_start_token_id=audio_start, audio_end_token_id=audio_end, user_token_id=user,
    )  # fmt: skip
    processor = hf.Qwen3OmniMoeProcessor(
        pictures.image_processor,
        pictures.video_processor,
        hf.WhisperFeatureExtractor(feature_size=32),
        tokenizer,
        chat_template=OMNI_TEMPLATE,
    )
    config = hf.Qwen3OmniMoeConfig(
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
        thinker_config=thinker.to_dict(),
        enable_audio_output=False,
    )
    return Tiny(config, tokenizer, processor)
