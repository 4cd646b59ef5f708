"""GLM's families: a timestamp after each frame of a video, M-RoPE over part of a head."""

from typing import Any

import transformers as hf

from tests.families.makers.base import (
    HEADS,
    HIDDEN,
    MROPE,
    PATCH,
    SIDE,
    Settings,
    Tiny,
    chat,
    decoder,
    ids,
    tower,
    vocabulary,
)

MEDIA = (
    "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>",
    "<|begin_of_video|>", "<|end_of_video|>",
)  # fmt: skip
TEMPLATE = chat(
    "<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_video|><|video|><|end_of_video|>"
)
ROPE = MROPE | {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0}


def _geometry() -> Settings:
    unit = 2 * PATCH
    size = {"shortest_edge": (2 * unit) ** 2 * 2, "longest_edge": (37 * unit) ** 2 * 2}
    return {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "size": size}


def _glm(config: Any, architecture: str, **more: Any) -> Tiny:
    tokenizer = vocabulary(TEMPLATE, *MEDIA)
    image, video, image_start, image_end, video_start, video_end = ids(tokenizer, *MEDIA)
    settings = config(
        text_config=decoder(tokenizer, rope_parameters=ROPE, **more),
        vision_config=tower(PATCH, image_size=SIDE),
        image_token_id=image,
        video_token_id=video,
        image_start_token_id=image_start,
        image_end_token_id=image_end,
        video_start_token_id=video_start,
        video_end_token_id=video_end,
        architectures=[architecture],
    )
    processor = hf.Glm4vProcessor(
        hf.Glm4vImageProcessor(**_geometry()),
        tokenizer,
        hf.Glm4vVideoProcessor(**_geometry()),
        chat_template=TEMPLATE,
    )
    return Tiny(settings, tokenizer, processor)


def glm4v() -> Tiny:
    """GLM-4.1V."""
    return _glm(hf.Glm4vConfig, "Glm4vForConditionalGeneration")


def glm4v_moe() -> Tiny:
    """GLM-4.5V: with experts."""
    return _glm(
        hf.Glm4vMoeConfig, "Glm4vMoeForConditionalGeneration", n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=HIDDEN, num_key_value_heads=HEADS,
        use_qk_norm=False,
    )  # fmt: skip


def glm_ocr() -> Tiny:
    """GLM-OCR."""
    return _glm(hf.GlmOcrConfig, "GlmOcrForConditionalGeneration")
